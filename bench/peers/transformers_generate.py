"""Driver of transformers' `generate`, for `bench/rollout.py --transformers PYTHON`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from work import EOS, PAD, VOCABULARY, Draw, Work, serve


def build(work: Work) -> Callable[[int], Draw]:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None

    def prepare(step: int) -> Draw:
        tokens = torch.tensor(work.prompt_batch(step))

        def draw() -> int:
            with torch.no_grad():
                drawn = model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=work.longest,
                    num_return_sequences=work.group,
                )
            assert drawn.shape == (work.samples, work.prompt_tokens + work.longest), drawn.shape
            return work.new_tokens

        return draw

    return prepare


if __name__ == "__main__":
    serve(build, lambda: {"transformers": transformers.__version__, "torch": torch.__version__})
