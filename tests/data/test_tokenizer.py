import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config import ModelSection
from posttrain.data import tokenizer as tokenizer_module
from posttrain.data import tokenizer_files
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import portable
from posttrain.errors import ConfigError
from posttrain.export.readers import compare_tokenizers
from posttrain.weights.load import load_model
from posttrain.weights.locate import read_model_files, run_tokenizer

GOLDEN = Path(__file__).parent.parent / "goldens" / "chat" / "byte_tokenizer"
TEXTS = [
    "Once upon a time, a <b>naïve</b> “cat” 😀.\n\n  Two  spaces\tand tabs",
    "def f(x):\n    return {'a': x}\n",
    "",
]
MARKED = "    c = a + b  日本語\ufffdé<s> </s><|im_start|>👩‍🚀"


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bytes_round_trip_any_text(text: str) -> None:
    tokenizer = load_tokenizer_once()
    tokens = tokenizer.encode_spans(text, literal=True)[0]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def load_tokenizer_once(cache: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006
    if not cache:
        cache.append(load_tokenizer("bytes"))
    return cache[0]


def test_bytes_saved_is_the_same_tokenizer(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    import transformers

    byte_tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    text = "naïve\r\n<|im_start|>user\n\x00 <eos>"
    assert again.encode(text) == other.encode(text, add_special_tokens=False) == byte_tokenizer.encode(text)
    assert again.encode(text)[8:10] == [259, ord("u")]
    for name in ("stop_ids", "prefix_ids", "vocab_size", "chat_template", "control_tokens", "generation"):
        assert getattr(again, name) == getattr(byte_tokenizer, name), name
    assert byte_tokenizer.stop_ids == tuple(byte_tokenizer.encode("<eos><|im_end|>"))
    assert byte_tokenizer.prefix_ids == tuple(byte_tokenizer.encode("<bos>"))
    assert (byte_tokenizer.vocab_size, byte_tokenizer.end_id) == (261, 258)


def read_by_transformers_4(folder: Path) -> None:
    python = os.environ.get("POSTTRAIN_TRANSFORMERS_4")
    if python is None:
        pytest.skip("needs POSTTRAIN_TRANSFORMERS_4, the Python of an environment with transformers 4")
    assert "transformers 4." in compare_tokenizers(folder, load_tokenizer(folder), python)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bytes", "tokenizers/qwen3", "tokenizers/mistral-7b-instruct", "models/stories260k"])
def test_transformers_4_reads_what_is_saved(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """The source's files, those with another template, and those that transformers 5 writes."""
    tokenizer = load_tokenizer(name if name == "bytes" else request.getfixturevalue("shared") / name)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    tokenizer.hf.save_pretrained(tmp_path / "written_by_5")
    saved = [tokenizer, tokenizer.with_chat_template(tmp_path / "t.jinja"), load_tokenizer(tmp_path / "written_by_5")]
    for number, one in enumerate(saved):
        one.save(tmp_path / str(number))
        (tmp_path / str(number) / "config.json").write_text('{"model_type": "qwen3"}')
        assert load_tokenizer(tmp_path / str(number)).chat_template == one.chat_template
        read_by_transformers_4(tmp_path / str(number))


def test_saved_files_have_the_form_that_transformers_4_reads() -> None:
    """transformers 5 writes a class, a list and a file that 4 does not know; other files stay byte for byte."""
    config = {"tokenizer_class": "TokenizersBackend", "backend": "b", "extra_special_tokens": ["<a>"], "x": 1}
    files = {
        "tokenizer.json": b"{ }",
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": b"hi",
    }
    made = portable(files)
    assert made.keys() == {"tokenizer.json", "tokenizer_config.json"} and made["tokenizer.json"] == b"{ }"
    expected = {"tokenizer_class": "PreTrainedTokenizerFast", "x": 1, "additional_special_tokens": ["<a>"]}
    assert json.loads(made["tokenizer_config.json"]) == expected | {"chat_template": "hi"}
    kept = {"tokenizer_config.json": b'{"tokenizer_class": "Qwen2Tokenizer",   "extra_special_tokens": {"i": "<i>"}}'}
    assert portable(kept) == kept
    assert json.loads(portable({})["tokenizer_config.json"]) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert portable(load_tokenizer("bytes").files).keys() == {"tokenizer.json", "tokenizer_config.json"}


def test_golden_byte_tokenizer_loads() -> None:
    tokenizer = load_tokenizer(GOLDEN)
    assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.prefix_ids) == (291, (279,), ())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("folder", "stop_ids", "prefix_ids", "vocab_size", "chat"),
    [
        ("models/stories260k", (2,), (1,), 512, False),
        ("tokenizers/qwen3", (151645, 151643), (), 151669, True),
        ("tokenizers/gpt2", (), (), 50257, False),
        ("tokenizers/mistral-7b-instruct", (2,), (1,), 32000, True),
    ],
)
def test_real_tokenizers_agree_with_their_files(
    shared: Path,
    folder: str,
    stop_ids: tuple[int, ...],
    prefix_ids: tuple[int, ...],
    vocab_size: int,
    chat: bool,
    tmp_path: Path,
) -> None:
    import tokenizers

    tokenizer = load_tokenizer(shared / folder)
    independent = tokenizers.Tokenizer.from_file(str(shared / folder / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text) == independent.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    found = (tokenizer.stop_ids, tokenizer.prefix_ids, tokenizer.vocab_size, tokenizer.chat_template is not None)
    assert found == (stop_ids, prefix_ids, vocab_size, chat)
    tokenizer.save(tmp_path)
    for name, content in tokenizer.files.items():
        assert (tmp_path / name).read_bytes() == content == (shared / folder / name).read_bytes(), name
    again = load_tokenizer(tmp_path)
    assert (again.stop_ids, again.prefix_ids, again.vocab_size) == (stop_ids, prefix_ids, vocab_size)
    assert again.chat_template == tokenizer.chat_template
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    # A prompt and its continuation read as one text, also where their border falls inside a token.
    for prompt, text in (("Q: ", "foo"), ("Q:", " foo bar"), ("a\n", "\nb")):
        before, after = tokenizer.encode_after(prompt, text)
        assert before == tokenizer.encode(prompt)
        assert tokenizer.decode(before + after) == prompt + text
    for whole in (*TEXTS, MARKED):
        check_every_split(tokenizer, tokenizer.encode(whole))
    if not stop_ids:
        with pytest.raises(ConfigError, match="names no end-of-sequence token"):
            _ = tokenizer.end_id


def check_every_split(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """The texts of a prompt and of what follows it make the whole; a character of both belongs to the second."""
    for skips in (True, False):
        whole = tokenizer.decode(tokens, skips)
        assert whole == tokenizer.hf.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        for at in range(len(tokens) + 1):
            before, after = tokens[:at], tokens[at:]
            prompt, text = tokenizer.decode(before, skips), tokenizer.decode(after, skips, after=before)
            first = len(whole) - len(text)
            assert whole[first:] == text and whole[:first] == prompt[:first] and prompt[first:] in ("", "\ufffd")


def test_a_character_that_is_cut_spoils_no_other(shared: Path) -> None:
    """Bytes as the fallback of a SentencePiece vocabulary, of which transformers replaces a whole run."""
    tokenizer = load_tokenizer(shared / "models" / "stories260k")
    tokens = tokenizer.encode("a日本")
    assert [tokenizer.decode(tokens[:-cut]) for cut in range(4)] == ["", "a日\ufffd", "a日\ufffd", "a日"]
    assert [tokenizer.decode(tokens[-cut:], after=tokens[:-cut]) for cut in range(1, 4)] == ["本"] * 3


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "[g]<s>a"), ("[g]<s>a", "[g]<s>a"), ("<s>a", "[g]<s>a"), ("[g]a", "[g]<s>a")]
)
def test_a_prefix_of_several_tokens(text: str, expected: str) -> None:
    """As GLM's `[gMASK]<sop>`: before a prompt, a completion and a plain text, and once."""
    from tokenizers import processors

    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["[g]", "<s>"]})
    ids = [(mark, tokenizer.hf.convert_tokens_to_ids(mark)) for mark in ("[g]", "<s>")]
    tokenizer.hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[g] <s> $A", special_tokens=ids
    )
    renderer, whole = Renderer(tokenizer, False), tokenizer.encode(expected)
    assert renderer.prompt([{"role": "user", "content": text}]) == whole
    assert renderer.text(text).tokens == [*whole, tokenizer.end_id]
    assert renderer.completion(text, "b").tokens == [*whole, ord("b"), tokenizer.end_id]


def test_generation_config_names_more_stop_tokens(tmp_path: Path) -> None:
    load_tokenizer("bytes").save(tmp_path)
    config = tmp_path / "generation_config.json"
    for named, expected in ((260, (258, 260)), ([260, 258, 7], (258, 260, 7)), (None, (258,))):
        config.write_text(json.dumps({"eos_token_id": named, "top_k": 20}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.stop_ids == expected
        tokenizer.save(tmp_path)
        assert load_tokenizer(tmp_path).stop_ids == expected
        assert json.loads(config.read_text())["top_k"] == 20
    # Without the file, or beside it: those of config.json, also of a multimodal model's text part.
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [9, 900]}}))
    assert load_tokenizer(tmp_path).stop_ids == (258, 7, 9), "900 is no token"
    config.write_text(json.dumps({"eos_token_id": [260]}))
    load_tokenizer(tmp_path).save(tmp_path)
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(tmp_path).stop_ids == (258, 260, 7, 9)


def test_stop_tokens_of_a_model_with_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    model = ModelSection.model_validate({"path": str(tmp_path), "tokenizer": "bytes", "stop_tokens": ["a"]})
    assert run_tokenizer("bytes", model).stop_ids == (258, 260, 9, 7, 97)
    random = ModelSection.model_validate({"init": {"model_type": "llama", "eos_token_id": 8}, "tokenizer": "bytes"})
    assert run_tokenizer("bytes", random).stop_ids == (258, 260, 8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path: .*config.json:1 is not JSON"):
        run_tokenizer("bytes", model)


def test_half_of_a_surrogate_pair_is_refused(byte_tokenizer: Tokenizer) -> None:
    """JSON may hold it (`"\\ud83d"`); no tokenizer can read it."""
    for encode in (byte_tokenizer.encode, byte_tokenizer.encode_spans):
        with pytest.raises(ConfigError, match=r"the text holds half of a surrogate pair, 'Hi \\ud83d'; remove it"):
            encode("Hi \ud83d")


def test_stored_truncation_is_not_applied(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.backend_tokenizer.enable_truncation(max_length=3)
    tokenizer.hf.backend_tokenizer.enable_padding(length=9)
    tokenizer.save(tmp_path)
    assert len(load_tokenizer(tmp_path).encode("abcde")) == 5


def test_errors_say_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"no file .*modle; did you mean 'model'\?; give a folder, a hub id or 'bytes'"
    ):
        load_tokenizer(str(tmp_path / "modle"))
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; it holds config.json"):
        load_tokenizer(tmp_path / "model")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        load_tokenizer(tmp_path / "model" / "config.json")
    (tmp_path / "model" / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_tokenizer(tmp_path / "model")
    assert "\n" not in str(caught.value)
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "model" / "tokenizer.model")
    with pytest.raises(ConfigError, match="has tokenizer.model but no tokenizer.json, .*pip install sentencepiece"):
        load_tokenizer(tmp_path / "model")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match="needs Python code of its repository, which is not run"):
        load_tokenizer(tmp_path / "model")
    for module in (tokenizer_module, tokenizer_files):
        monkeypatch.setattr(module, "hub_is_reachable", lambda: False)
    with pytest.raises(ConfigError, match="no folder owner/name; and the hub cannot be reached") as caught:
        load_tokenizer("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_loads_quietly_without_torch(tmp_path: Path) -> None:
    load_tokenizer("bytes").save(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from posttrain.data.tokenizer import load_tokenizer\n"
        f"print(load_tokenizer({str(tmp_path)!r}).encode('ab'))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        cwd=GOLDEN.parents[3],
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "[97, 98]\n", "")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    """With and without tokenizer files, wherever a model is read."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    said = "is an adapter in PEFT's format, not a model; give it as model.adapter .*and org/base as model.path"
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(tmp_path)
    load_tokenizer("bytes").save(tmp_path)
    load_tokenizer(tmp_path)
    for read in (read_model_files, load_model):
        with pytest.raises(ConfigError, match=said):
            read(str(tmp_path))
