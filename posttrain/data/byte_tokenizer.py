"""Built-in byte tokenizer: one token per UTF-8 byte, five control tokens, a ChatML template; no files."""

from __future__ import annotations

from typing import Any

from posttrain.user_code import import_transformers

CONTROL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
FIRST_CONTROL_ID = 256

BYTE_GENERATION = {"eos_token_id": [FIRST_CONTROL_ID + 2, FIRST_CONTROL_ID + 4]}
"""Stop tokens: plain text ends with `<eos>`, a chat turn with `<|im_end|>`."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def byte_characters() -> list[str]:
    """Printable character of each byte in byte-level vocabularies: itself, or the next free one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(256, 512))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def build_byte_tokenizer() -> Any:
    """Build a `PreTrainedTokenizerFast` whose token ids are bytes; decoding reproduces any UTF-8 text exactly."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", FIRST_CONTROL_ID + 1)]
    )
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
