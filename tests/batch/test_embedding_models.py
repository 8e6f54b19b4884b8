"""Folders of sentence-transformers: vectors, cut texts, prompts, saving, and what is not read."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import httpx
import jax
import numpy as np
import paths
import pytest
from serving_tools import running_server
from starlette.testclient import TestClient

import jaxllm
from jaxllm.batch.row_tasks import Embedder, RowEmbedder
from jaxllm.batch.rows import RawRow
from jaxllm.cli import serve
from jaxllm.cli.main import main
from jaxllm.common.errors import CheckpointError, InputError, UnsupportedError
from jaxllm.models.embedding import text_vectors
from jaxllm.models.lora import LoraConfig, add_lora, merge_lora
from jaxllm.serve.http.app import make_app
from jaxllm.serve.http.state import Startup

pytestmark = pytest.mark.filterwarnings("ignore:embed. .* were cut")
DATA = paths.DATA / "sentence_transformers"
CASES = {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))}


def make_folder(case: str, folder: Path) -> Path:
    """The folder that sentence-transformers wrote."""
    shutil.copytree(DATA / case.split("_")[0], folder)
    for name, content in CASES[case]["files"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        is_weight = name.endswith((".bin", ".safetensors"))
        (folder / name).write_bytes(base64.b64decode(content) if is_weight else content.encode())
    return folder


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def close(vectors, expected) -> None:
    """To 1e-5 of the length of each vector."""
    expected = np.asarray(expected)
    assert np.shape(vectors) == expected.shape
    errors = np.linalg.norm(vectors - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < 1e-5, errors


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_sentence_transformers(case, tmp_path):
    model, tokenizer = jaxllm.load(make_folder(case, tmp_path / "model"))
    texts, lengths = CASES[case]["texts"], CASES[case]["lengths"]
    for call in CASES[case]["calls"]:
        prompt = {name: value for name, value in call.items() if name != "vectors"}
        close(jaxllm.embed(model, texts, tokenizer, **prompt), call["vectors"])
    assert jaxllm.embed(model, [], tokenizer).shape == (0, len(call["vectors"][0]))
    jaxllm.save_hf(tmp_path / "saved", model, tokenizer)
    close(jaxllm.embed(tmp_path / "saved", texts, **prompt), call["vectors"])
    task = RowEmbedder(model, tokenizer, prompt="")
    outputs = list(task.answer(RawRow(i, i, text) for i, text in enumerate(texts)))
    assert [x.prompt_tokens for x in sorted(outputs, key=lambda x: x.index)] == lengths
    whole = [len(tokenizer.encode(text)) for text in texts]
    cut = sum(a > b for a, b in zip(whole, lengths, strict=True))
    assert task.counts.cut_texts == cut > 0
    with pytest.warns(UserWarning, match=rf"embed: {cut} of 3 texts .* \d+ tokens, and were cut"):
        jaxllm.embed(model, texts, tokenizer, prompt="")


def test_pooling_in_the_strict_modes_of_jax():
    kinds = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    states = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], bool)
    layer = {"linear.weight": np.ones((4, 18), np.float32), "linear.bias": np.ones(4, np.float32)}
    options = {"pooling": kinds, "steps": ("linear", "normalize")}
    expected = text_vectors(states, mask, [layer], **options)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        vectors = text_vectors(*jax.device_put((states, mask, [layer])), **options)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)


def vectors_of(folder: Path, case: str, number: int = 0) -> tuple[np.ndarray, list[list[float]]]:
    """The vectors of a folder, and those of a call of the library."""
    call = CASES[case]["calls"][number]
    prompt = {name: value for name, value in call.items() if name != "vectors"}
    return jaxllm.embed(folder, CASES[case]["texts"], **prompt), call["vectors"]


def saved_ways(folder: Path, model, tokenizer) -> dict[str, Path]:
    """The model, saved again in several ways."""
    jaxllm.save_hf(folder / "hf", model, tokenizer)
    lora = add_lora(model, LoraConfig(rank=2, targets="all-linear"))
    jaxllm.save_hf(folder / "lora", merge_lora(lora), tokenizer)
    jaxllm.save_orbax(folder / "orbax", model, tokenizer)
    jaxllm.save_hf(folder / "again", *jaxllm.load_orbax(folder / "orbax"))
    words = ["export", str(folder / "model"), str(folder / "exported")]
    assert main(words) == 0
    return {name: folder / name for name in ("hf", "lora", "again", "exported")}


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
def test_files_survive_saving(case, tmp_path):
    model, tokenizer = jaxllm.load(make_folder(case, tmp_path / "model"))
    for name, folder in saved_ways(tmp_path, model, tokenizer).items():
        assert sorted(folder.rglob("*.json")) != [], name
        written = {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")}
        expected = {
            file.replace("pytorch_model.bin", "model.safetensors") for file in CASES[case]["files"]
        }
        assert expected <= written, name
        for file, content in CASES[case]["files"].items():
            if file.endswith(".json") and "token" not in file:
                assert json.loads((folder / file).read_text()) == json.loads(content), (name, file)
        close(*vectors_of(folder, case))
    orbax, tokenizer = jaxllm.load_orbax(tmp_path / "orbax")
    texts = CASES[case]["texts"]
    close(jaxllm.embed(orbax, texts, tokenizer), vectors_of(tmp_path / "model", case)[1])


def test_a_replaced_model_leaves_no_modules(tmp_path):
    folder = make_folder("llama_two", tmp_path / "model")
    plain, _ = jaxllm.load(DATA / "llama")
    tokenizer = jaxllm.load(folder)[1]
    jaxllm.save_hf(folder, plain, tokenizer, overwrite=True)
    assert not (folder / "modules.json").exists()


def test_what_is_asked_for_wins(tmp_path):
    texts, case = CASES["t5_gtr"]["texts"], "llama_two"
    model, tokenizer = jaxllm.load(make_folder(case, tmp_path / "model"))
    declared = jaxllm.embed(model, texts, tokenizer)
    lengths = np.linalg.norm(declared, axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 0.1
    close(jaxllm.embed(model, texts, tokenizer, normalize=True), declared / lengths)
    last = jaxllm.embed(model, texts, tokenizer, pooling="cls")
    close(last, declared[:, :16])
    model, tokenizer = jaxllm.load(make_folder("qwen3_embedding", tmp_path / "other"))
    raw = jaxllm.embed(model, texts, tokenizer, normalize=False)
    assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
    close(raw / np.linalg.norm(raw, axis=1, keepdims=True), jaxllm.embed(model, texts, tokenizer))
    model, tokenizer = jaxllm.load(make_folder("t5_lower", tmp_path / "third"))
    with pytest.raises(UnsupportedError, match=r"2_Dense: takes vectors of 32 values, .* have 16"):
        jaxllm.embed(model, texts, tokenizer, pooling="mean")
    # A folder without modules.json embeds as ever.
    plain, _ = jaxllm.load(DATA / "t5")
    assert jaxllm.embed(plain, [texts[1] * 3], tokenizer).shape == (1, 16)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode: expected .*'median'"),
        ("1_Pooling/config.json", {"is_new": 1}, "1_Pooling/config.json: is_new: unknown"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "expected Identity.*'os.sys"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.PReLU"}, "found 'torch.nn.PReLU"),
        ("2_Dense/config.json", {"activation_function": "torch.nnx.Tanh"}, "found 'torch.nnx.Tanh"),
        ("2_Dense/config.json", {"in_features": 17}, r"2_Dense: config.json implies .*\(24, 17\)"),
        ("2_Dense/config.json", {"bias": True}, "2_Dense: config.json implies .*linear.bias"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task: expec"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "modality_config: exp"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length: expected an int"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts: expected"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type: expec"),
    ],
)
def test_what_is_not_read_is_refused_by_the_embedding_alone(file, fields, message, tmp_path):
    folder = make_folder("t5_gtr", tmp_path / "model")
    edit(folder / file, **fields)
    model, tokenizer = jaxllm.load(folder)
    with pytest.raises(UnsupportedError, match=message):
        jaxllm.embed(model, ["Hi"], tokenizer)


@pytest.mark.parametrize(
    ("number", "fields", "message"),
    [
        (2, {"type": "sentence_transformers.models.LayerNorm"}, "module 2 is .*models.LayerNorm"),
        (1, {"type": "sentence_transformers.models.WeightedLayerPooling"}, "WeightedLayerPooling"),
        (0, {"type": "sentence_transformers.base.modules.router.Router"}, "module 0 is .*Router"),
        (2, {"type": "evil.Dense"}, "module 2 is 'evil.Dense'"),
        (1, {"path": "../1_Pooling"}, "module 1 is .* in '../1_Pooling'"),
        (2, {"path": "/tmp"}, "module 2 is .* in '/tmp'; jaxllm reads"),
        (2, {"path": "a\\b"}, "module 2 is"),
        (2, {"path": ".."}, r"module 2 is .* in '\.\.'"),
        (0, {"path": "0_Transformer"}, "module 0 is .* in '0_Transformer'"),
        (1, {"path": 3}, r"modules.json: \[1\].path: expected a string, found 3"),
        (1, {"path": "9_Pooling"}, "9_Pooling/config.json: no such file"),
        (1, {"path": ""}, r"module 1 is .* in ''; jaxllm reads"),
        (2, {"path": "1_Pooling"}, "module 2 is .*Dense' in '1_Pooling'; .* a folder of its own"),
    ],
)
def test_modules_that_are_not_read(number, fields, message, tmp_path):
    folder = make_folder("t5_gtr", tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules[number] |= fields
    (folder / "modules.json").write_text(json.dumps(modules))
    model, tokenizer = jaxllm.load(folder)
    with pytest.raises(UnsupportedError, match=message):
        Embedder(model, 20)
    with pytest.warns(UserWarning, match=r"saved without modules\.json"):
        jaxllm.save_hf(tmp_path / "saved", model, tokenizer)


def test_a_causal_model_that_was_saved_without_its_head(tmp_path):
    folder = make_folder("qwen3_embedding", tmp_path / "model")
    edit(folder / "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    model, tokenizer = jaxllm.load(folder)
    jaxllm.save_hf(tmp_path / "saved", model, tokenizer)
    close(*vectors_of(tmp_path / "saved", "qwen3_embedding"))
    (folder / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        jaxllm.load(folder)


def test_the_folders_of_version_1(tmp_path):
    folder = make_folder("t5_gtr", tmp_path / "model")
    (folder / "0_Transformer").mkdir()
    (folder / "config.json").rename(folder / "0_Transformer" / "config.json")
    with pytest.raises(
        UnsupportedError, match=r"no config\.json beside modules\.json, as version 1"
    ):
        jaxllm.load(folder)


def test_a_server_of_a_model_without_a_head(tmp_path):
    words = [str(make_folder("gemma3_embedding", tmp_path / "model")), "--no-compile-cache"]
    arguments = serve._parser("serve").parse_args([*words, "--embeddings"])
    settings = serve._settings(arguments, None)
    state = serve._load(arguments, settings, Startup(settings))
    client = TestClient(make_app(Startup(state)))
    case = CASES["gemma3_embedding"]
    answer = client.post("/v1/embeddings", json={"input": case["texts"]}).json()
    close([item["embedding"] for item in answer["data"]], case["calls"][0]["vectors"])
    assert client.get("/health").json() == {"status": "ok"}
    assert "jaxllm_slots 0.0" in client.get("/metrics").text
    (listed,) = client.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == 64
    for name, field in (("", {"prompt": "a"}), ("chat/", {"messages": [{"role": "user"}]})):
        answer = client.post(f"/v1/{name}completions", json=field)
        assert answer.status_code == 404
        assert "no language-model head" in answer.text
    assert state.texts is not None
    state.texts.close()


@pytest.mark.parametrize("content", ["[]", "{}", "[1", "[{}]", "null"])
def test_damaged_modules(content, tmp_path):
    folder = make_folder("llama_two", tmp_path / "model")
    (folder / "modules.json").write_text(content)
    model, tokenizer = jaxllm.load(folder)
    with pytest.raises(UnsupportedError, match=r"modules\.json: "):
        jaxllm.embed(model, ["Hi"], tokenizer)


def test_prompts(tmp_path):
    model, tokenizer = jaxllm.load(make_folder("qwen3_weighted", tmp_path / "model"))
    for options, message in [
        ({"prompt_name": "other"}, "prompt_name: no prompt is named 'other'; there is query, docu"),
        ({"prompt_name": "query", "prompt": "a"}, "prompt_name cannot be combined with prompt"),
        ({"prompt": "Find " * 30}, "prompt: leaves no token of the text"),
    ]:
        with pytest.raises(InputError, match=message):
            jaxllm.embed(model, ["Hi"], tokenizer, **options)
    edit(tmp_path / "model" / "config_sentence_transformers.json", default_prompt_name="other")
    with pytest.raises(InputError, match=r"^default_prompt_name: no prompt is named 'other'"):
        jaxllm.embed(tmp_path / "model", ["Hi"])
    with pytest.raises(InputError, match="prompt_name: has no effect on input_ids"):
        jaxllm.embed(model, [[5, 6]], tokenizer, prompt_name="query")
    with pytest.raises(InputError, match="has 15 tokens; expected 1 to 14"):
        jaxllm.embed(model, [[5] * 15], tokenizer)
    with pytest.raises(InputError, match=r"prompt_name: no prompt is named 'query'; there is none"):
        jaxllm.embed(jaxllm.load(DATA / "llama")[0], ["Hi"], tokenizer, prompt_name="query")


@pytest.mark.ci
def test_command_pipeline_and_server(tmp_path):
    case = "qwen3_weighted"
    folder = make_folder(case, tmp_path / "model")
    edit(folder / "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    texts = CASES[case]["texts"]
    by_name = {call.get("prompt_name"): call["vectors"] for call in CASES[case]["calls"]}
    lines = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["generate", "--model", folder, "--input", tmp_path / "in.jsonl", "--no-compile-cache"]
    words += ["--embed", "--prompt-name", "passage", "--output", tmp_path / "out.jsonl"]
    assert main([*map(str, words)]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    close([row["embedding"] for row in written], by_name["passage"])
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["run"]["cut_texts"] == 1
    assert main([*map(str, words[:-5]), "--prompt-name", "query", "--output", "-"]) == 2
    headless = jaxllm.pipeline("feature-extraction", folder, architecture="Qwen3Model")
    close(headless(texts), by_name["query"])
    assert headless(texts[0], pooling="mean").shape == (16,)
    model, tokenizer = jaxllm.load(folder)
    embedder = Embedder(model, 20, tokenizer=tokenizer)
    with running_server(model, tokenizer, context=20, embedder=embedder) as server:
        url = f"{server.url}/v1/embeddings"
        answer = httpx.post(url, json={"input": texts, "prompt_name": "passage"}).json()
        close([item["embedding"] for item in answer["data"]], by_name["passage"])
        assert answer["usage"]["cut_texts"] == 1
        assert answer["usage"]["prompt_tokens"] < 14 * 3
        close(
            [item["embedding"] for item in httpx.post(url, json={"input": texts}).json()["data"]],
            by_name["query"],
        )
        for body in ({"input": texts, "prompt_name": "x"}, {"input": [5], "prompt": "a"}):
            assert httpx.post(url, json=body).status_code == 400
