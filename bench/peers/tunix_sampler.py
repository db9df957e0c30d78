"""Driver of Tunix's sampler, for `bench/rollout.py --tunix PYTHON`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from tunix.generate import sampler as tunix
from tunix.models.qwen3 import model as qwen3
from work import EOS, FIRST, PAD, VOCABULARY, Draw, Work, serve


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Tunix takes text: token i is the word `wi`."""
    words = {"<pad>": PAD, "<eos>": EOS, "<bos>": FIRST - 1} | {f"w{i}": i for i in range(FIRST, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token=None)


def build(work: Work) -> Callable[[int], Draw]:
    config = qwen3.ModelConfig(
        num_layers=4,
        vocab_size=VOCABULARY,
        embed_dim=256,
        hidden_dim=768,
        num_heads=8,
        head_dim=32,
        num_kv_heads=4,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    cache = tunix.CacheConfig(cache_size=work.prompt_tokens + work.longest, num_layers=4, num_kv_heads=4, head_dim=32)
    sampler = tunix.Sampler(qwen3.Qwen3(config, rngs=nnx.Rngs(params=0)), word_tokenizer(), cache)

    def prepare(step: int) -> Draw:
        prompts = [" ".join(f"w{t}" for t in prompt) for prompt in work.prompt_batch(step) for _ in range(work.group)]

        def draw() -> int:
            drawn = sampler(
                prompts,
                max_generation_steps=work.longest,
                max_prompt_length=work.prompt_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                seed=step,
            )
            assert len(drawn.tokens) == work.samples
            return work.new_tokens

        return draw

    return prepare


if __name__ == "__main__":
    serve(build, lambda: {name: version(name) for name in ("google-tunix", "jax", "flax")})
