"""T5X checkpoints, written by T5X's own checkpointers, beside the logits of T5X's networks."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import on_devices
from paths import DATA

import jaxllm
from jaxllm.auto import AutoConfig, AutoTokenizer
from jaxllm.batch.job.identity import checkpoint_digests
from jaxllm.checkpoint.t5x import T5XView
from jaxllm.cli.export import main as export
from jaxllm.cli.generate import main as generate
from jaxllm.errors import CheckpointError, ConfigError, MissingFileError, UnsupportedError
from jaxllm.models import T5Config
from jaxllm.planning import abstract_model

FOLDER = DATA / "t5x"
NAMES = sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz"))
with np.load(FOLDER / "logits.npz") as _arrays:
    LOGITS = dict(_arrays)


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[[str], Path]:
    """Unpacks a checkpoint, and returns the folder of the run that holds it."""

    def unpack(name: str) -> Path:
        with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path / name

    return unpack


def logits_of(model: Any) -> np.ndarray:
    inputs = LOGITS["input_ids"]
    output = model(
        inputs,
        attention_mask=(inputs > 0).astype(np.int32),
        decoder_input_ids=LOGITS["decoder_input_ids"],
    )
    return np.asarray(output.logits)


def check_logits(model: Any, name: str) -> None:
    expected = LOGITS[name.removesuffix("_orbax").removesuffix("_inline")]
    assert expected.std() > 1
    np.testing.assert_allclose(logits_of(model), expected, atol=1e-4 * expected.std(), rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_t5x(name: str, unpack: Callable[[str], Path]) -> None:
    model, _ = jaxllm.load(unpack(name))
    check_logits(model, name)


def test_generate_takes_a_checkpoint(
    unpack: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = unpack("t5_1_1")
    shutil.copy(DATA / "tokenizers" / "t5.model", run / "spiece.model")
    step = run / "checkpoint_7"
    assert generate(["hello", "--model", str(step), "--max-length", "6", "--no-compile-cache"]) == 0
    printed = capsys.readouterr().out
    model, tokenizer = jaxllm.load(step)
    output = jaxllm.generate(model, **tokenizer(["hello"]), max_length=6)
    expected = tokenizer.decode(output.sequences[0], skip_special_tokens=True)
    assert expected.strip()
    assert printed.strip() == expected.strip()


FOUR = """
import sys
from pathlib import Path
import jaxllm, numpy as np
from jaxllm.models.weights import parameters

for folder in map(Path, sys.argv[1:]):
    expected = parameters(jaxllm.load(folder)[0])
    for mesh in (jaxllm.make_mesh(fsdp=2, tensor=2), jaxllm.make_mesh(fsdp=4)):
        found = parameters(jaxllm.load(folder, mesh=mesh)[0])
        for path, x in expected.items():
            np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(x))
print("done")
"""


def test_shards_are_those_of_the_whole(unpack: Callable[[str], Path]) -> None:
    folders = [unpack(name) for name in ("t5_1_1", "umt5_layers", "umt5_scanned_orbax")]
    assert on_devices(FOUR, *folders, devices=4) == "done\n"


@pytest.mark.parametrize("name", ["t5_1_1", "t5_1_1_inline", "umt5_layers", "umt5_scanned"])
def test_slices_are_those_of_the_whole_tensor(name: str, unpack: Callable[[str], Path]) -> None:
    rng = np.random.default_rng(0)
    with T5XView(unpack(name) / "checkpoint_7" / "checkpoint") as view:
        for tensor in view.names():
            whole = view.read(tensor)
            assert whole.shape == view.info(tensor).shape
            for _ in range(3):
                ends = [sorted(rng.integers(0, size + 1, 2)) for size in whole.shape]
                index = tuple(slice(int(start), int(stop)) for start, stop in ends)
                np.testing.assert_array_equal(view.read(tensor, index), whole[index])
            np.testing.assert_array_equal(view.read(tensor, (slice(1, None),)), whole[1:])


def test_reads_only_the_chunks_of_a_slice(unpack: Callable[[str], Path]) -> None:
    step = unpack("t5_1_1") / "checkpoint_7"
    with T5XView(step / "checkpoint") as view:
        whole = view.read("lm_head.weight")
        (step / "target.decoder.logits_dense.kernel" / "0.1").unlink()
        part = view.read("lm_head.weight", (slice(0, 128), slice(None)))
        np.testing.assert_array_equal(part, whole[:128])


def test_a_slice_reads_the_heads_that_it_needs(unpack: Callable[[str], Path]) -> None:
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    with T5XView(unpack("umt5_layers") / "checkpoint_7" / "checkpoint") as view:
        tensor, whole, asked = view._tensors[name], view.read(name), []
        leaf = view._leaves[tensor.path]
        view._leaves[tensor.path] = dataclasses.replace(
            leaf, read=lambda index: asked.append(index) or leaf.read(index)
        )
        size = leaf.shape[2]
        part = view.read(name, (slice(size + 1, 2 * size), slice(None)))
        np.testing.assert_array_equal(part, whole[size + 1 : 2 * size])
    assert [index[1] for index in asked] == [slice(1, 2)]


def test_a_stack_of_layers_is_read_once_and_released(unpack: Callable[[str], Path]) -> None:
    step = unpack("umt5_scanned") / "checkpoint_7"
    names = [f"encoder.block.{i}.layer.1.DenseReluDense.wo.weight" for i in range(3)]
    with T5XView(step / "checkpoint") as view:
        first = view.read(names[0])
        shutil.rmtree(step / "target.encoder.encoder.mlp.wo.kernel")
        assert not np.array_equal(view.read(names[1]), first)
        for name in names:
            view.release_pages(name)
        with pytest.raises(CheckpointError, match=r"mlp\.wo\.kernel"):
            view.read(names[0])


@pytest.mark.parametrize(
    "place",
    [
        lambda run: run,
        lambda run: run / "checkpoint_7",
        lambda run: run / "checkpoint_7" / "checkpoint",
    ],
)
def test_the_run_the_step_and_the_file_are_one_checkpoint(
    place: Callable[[Path], Path], unpack: Callable[[str], Path]
) -> None:
    model, _ = jaxllm.load(place(unpack("t5_1_1_inline")))
    check_logits(model, "t5_1_1_inline")


@pytest.mark.parametrize("name", ["checkpoint_0", "test_t5_tiny.checkpoint_0"])
def test_a_single_file_with_config_json_beside_it(
    name: str, unpack: Callable[[str], Path], tmp_path: Path
) -> None:
    run = unpack("t5_1_1_inline")
    file = tmp_path / "file" / name
    file.parent.mkdir()
    shutil.copy(run / "checkpoint_7" / "checkpoint", file)
    shutil.copy(run / "config.json", file.parent)
    model, _ = jaxllm.load(file)
    check_logits(model, "t5_1_1_inline")


def test_config_json_in_the_step_comes_first(unpack: Callable[[str], Path]) -> None:
    run = unpack("t5_1_0")
    shutil.move(run / "config.json", run / "checkpoint_7")
    (run / "config.json").write_text("not read")
    model, _ = jaxllm.load(run)
    check_logits(model, "t5_1_0")


@pytest.mark.parametrize("name", ["t5_1_0", "umt5_scanned"])
def test_a_config_stands_for_the_missing_config_json(
    name: str, unpack: Callable[[str], Path], tmp_path: Path
) -> None:
    run = unpack(name)
    fields = json.loads((run / "config.json").read_text())
    (run / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"no config\.json.*config="):
        jaxllm.load(run)
    by_fields, _ = jaxllm.load(run, config=fields)
    check_logits(by_fields, name)
    by_config, _ = jaxllm.load(run, config=T5Config.from_dict(fields))
    check_logits(by_config, name)
    jaxllm.save_hf(tmp_path / "saved", by_config)
    saved, _ = jaxllm.load(tmp_path / "saved")
    check_logits(saved, name)


@pytest.mark.parametrize("name", ["mt5_tied", "t5_1_1_bfloat16", "umt5_scanned"])
def test_a_saved_folder_computes_the_same(
    name: str, unpack: Callable[[str], Path], tmp_path: Path
) -> None:
    model, _ = jaxllm.load(unpack(name))
    jaxllm.save_hf(tmp_path / "saved", model)
    saved, _ = jaxllm.load(tmp_path / "saved")
    check_logits(saved, name)
    dtypes = {model.checked_card("x").origin.dtypes, saved.checked_card("x").origin.dtypes}
    assert len(dtypes) == 1


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "t5_1_1",
            {"num_layers": 4},
            r"checkpoint: the tensors do.*num_layers 4.*missing encoder\.block\.3",
        ),
        ("t5_1_1", {"num_layers": 2}, r"num_layers 2.*unexpected encoder\.block\.2"),
        ("t5_1_1", {"num_decoder_layers": 3}, r"num_decoder_layers 3.*missing decoder\.block\.2"),
        ("t5_1_1", {"num_decoder_layers": 1}, r"num_decoder_layers 1.*unexpected decoder"),
        ("t5_1_1", {"feed_forward_proj": "relu"}, r"feed_forward_proj 'relu'.*DenseReluDense\.wi"),
        ("t5_1_0", {"feed_forward_proj": "gated-gelu"}, r"feed_forward_proj 'gated-gelu'"),
        ("t5_1_1", {"d_model": 16}, r"\[20, 8\].*\[20, 16\].*d_model"),
        ("t5_1_1", {"d_ff": 15}, r"\[8, 14\].*\[8, 15\].*d_ff"),
        ("t5_1_1", {"d_kv": 6}, r"\[20, 8\].*\[24, 8\].*d_kv"),
        ("t5_1_1", {"num_heads": 5, "d_kv": 4}, r"\[32, 4\].*\[32, 5\].*num_heads"),
        ("t5_1_1", {"relative_attention_num_buckets": 16}, r"relative_attention_num_buckets"),
        ("umt5_scanned", {"num_layers": 2}, r"num_layers 2.*unexpected encoder\.block\.2"),
        ("umt5_scanned", {"vocab_size": 80}, r"\[256, 8\].*\[80, 8\].*vocab_size"),
        ("umt5_layers", {"model_type": "t5", "architectures": None}, r"relative_attention_bias"),
        ("t5_1_1", {"tie_word_embeddings": True}, r"a decoder/logits_dense.*tie_word_embeddings"),
        ("t5_1_0", {"tie_word_embeddings": False}, r"no decoder/logits_dense.*tie_word_embedd"),
        ("t5_1_1", {"scale_decoder_outputs": True}, r"scale_decoder_outputs True"),
        ("mt5_tied", {"scale_decoder_outputs": False}, r"scale_decoder_outputs False"),
    ],
)
def test_a_config_that_does_not_fit_the_tree(
    name: str, fields: dict[str, Any], message: str, unpack: Callable[[str], Path]
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        jaxllm.load(unpack(name), config=fields)


def test_a_whole_config_must_scale_as_t5x_does(unpack: Callable[[str], Path]) -> None:
    run = unpack("t5_1_1")
    config = T5Config.from_dict(json.loads((run / "config.json").read_text()))
    with pytest.raises(ConfigError, match="scale_decoder_outputs True"):
        jaxllm.load(run, config=dataclasses.replace(config, scale_decoder_outputs=True))


def test_a_config_of_transformers_5_says_nothing_about_the_head(
    unpack: Callable[[str], Path],
) -> None:
    fields = {"transformers_version": "5.24.0", "tie_word_embeddings": True}
    model, _ = jaxllm.load(unpack("t5_1_1"), config=fields)
    check_logits(model, "t5_1_1")


def zarray(step: Path, array: str, **fields: Any) -> None:
    """Changes fields of an array's .zarray."""
    path = step / array / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


KERNEL = "target.decoder.logits_dense.kernel"


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def link(path: Path) -> None:
    """Moves a file or folder out of the checkpoint, and leaves a link in its place."""
    target = path.parents[3] / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def renamed(step: Path, folder: str) -> None:
    """Lets the msgpack name another folder, of as many characters, for the head."""
    file, old = step / "checkpoint", f"{KERNEL}/".encode()
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, folder.ljust(len(old), "x").encode()))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing chunk": (lambda s: (s / KERNEL / "0.1").unlink(), KERNEL),
    "missing array": (lambda s: shutil.rmtree(s / KERNEL), KERNEL),
    "missing header": (lambda s: (s / KERNEL / ".zarray").unlink(), KERNEL),
    "cut chunk": (lambda s: cut(s / KERNEL / "0.0", 20), KERNEL),
    "empty chunk": (lambda s: (s / KERNEL / "0.0").write_bytes(b""), KERNEL),
    "header is no JSON": (lambda s: (s / KERNEL / ".zarray").write_text("{"), KERNEL),
    "other shape": (lambda s: zarray(s, KERNEL, shape=[8, 257]), r"logits_dense.*\[8, 257\]"),
    "other dtype": (lambda s: zarray(s, KERNEL, dtype="<f2"), "logits_dense.*float16"),
    "huge shape": (lambda s: zarray(s, KERNEL, shape=[2**40, 2**20]), "logits_dense"),
    "huge chunks": (lambda s: zarray(s, KERNEL, chunks=[2**20, 2**10]), "chunks.*larger"),
    "other rank": (lambda s: zarray(s, KERNEL, shape=[8, 256, 1], chunks=[1, 1, 1]), KERNEL),
    "no chunk size": (lambda s: zarray(s, KERNEL, chunks=[0, 0]), KERNEL),
    "other compressor": (lambda s: zarray(s, KERNEL, compressor={"id": "bz2"}), "bz2"),
    "filters": (lambda s: zarray(s, KERNEL, filters=[{"id": "delta"}]), KERNEL),
    "link of a chunk": (lambda s: link(s / KERNEL / "0.1"), "leads out"),
    "link of an array": (lambda s: link(s / KERNEL), "leads out"),
    "path above": (lambda s: renamed(s, "../"), "no folder within"),
    "absolute path": (lambda s: renamed(s, "/tmp/"), "no folder within"),
    "path of a drive": (lambda s: renamed(s, "C:\\"), "no folder within"),
    "cut msgpack": (lambda s: cut(s / "checkpoint", 100), "checkpoint.*incomplete"),
    "longer msgpack": (
        lambda s: (s / "checkpoint").write_bytes((s / "checkpoint").read_bytes() + b"x"),
        "1 bytes follow",
    ),
    "empty msgpack": (lambda s: (s / "checkpoint").write_bytes(b""), "is empty"),
    "no tree": (lambda s: (s / "checkpoint").write_bytes(b"\x80"), "no tree named target"),
    "a number": (lambda s: (s / "checkpoint").write_bytes(b"\x07"), "no tree named target"),
    "checkpoint of TensorFlow": (
        lambda s: (s / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n'),
        "TensorFlow",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_an_error(damage: str, unpack: Callable[[str], Path]) -> None:
    run = unpack("t5_1_1")
    harm, message = DAMAGES[damage]
    harm(run / "checkpoint_7")
    with pytest.raises((CheckpointError, MissingFileError, UnsupportedError), match=message) as it:
        jaxllm.load(run)
    assert str(run / "checkpoint_7") in str(it.value)


def test_a_link_within_the_checkpoint_is_read(unpack: Callable[[str], Path]) -> None:
    chunk = unpack("t5_1_1") / "checkpoint_7" / KERNEL / "0.1"
    chunk.rename(chunk.with_name("chunk"))
    chunk.symlink_to("chunk")
    model, _ = jaxllm.load(chunk.parents[2])
    check_logits(model, "t5_1_1")


@pytest.mark.parametrize("part", ["manifest.ocdbt", "d"])
def test_a_damaged_orbax_checkpoint_is_an_error(part: str, unpack: Callable[[str], Path]) -> None:
    state = unpack("t5_1_1_orbax") / "checkpoint_7" / "state"
    for path in [state / part, *state.glob(f"*/{part}")]:
        shutil.rmtree(path) if path.is_dir() else path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="checkpoint_7/state"):
        jaxllm.load(state.parents[1])


def test_the_states_of_the_optimizer_are_not_read(unpack: Callable[[str], Path]) -> None:
    run = unpack("t5_1_0")
    states = list((run / "checkpoint_7").glob("state.*"))
    assert states
    for path in states:
        shutil.rmtree(path)
    model, _ = jaxllm.load(run)
    check_logits(model, "t5_1_0")


def test_which_of_several_checkpoints(unpack: Callable[[str], Path]) -> None:
    run = unpack("t5_1_0")
    shutil.copytree(run / "checkpoint_7", run / "checkpoint_8.tmp-1700000000")
    model, _ = jaxllm.load(run)
    check_logits(model, "t5_1_0")
    with pytest.raises(MissingFileError, match="interrupted"):
        jaxllm.load(run / "checkpoint_8.tmp-1700000000")
    shutil.copytree(run / "checkpoint_7", run / "checkpoint_8")
    with pytest.raises(MissingFileError, match="checkpoint_7, checkpoint_8"):
        jaxllm.load(run)
    model, _ = jaxllm.load(run / "checkpoint_8")
    check_logits(model, "t5_1_0")


def test_safetensors_come_before_a_file_named_checkpoint(
    unpack: Callable[[str], Path], tmp_path: Path
) -> None:
    model, _ = jaxllm.load(unpack("t5_1_0"))
    jaxllm.save_hf(tmp_path / "saved", model)
    (tmp_path / "saved" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n')
    model, _ = jaxllm.load(tmp_path / "saved")
    check_logits(model, "t5_1_0")


def test_config_and_tokenizer_of_a_checkpoint(unpack: Callable[[str], Path]) -> None:
    run = unpack("t5_1_0")
    shutil.copy(DATA / "tokenizers" / "t5.model", run / "spiece.model")
    for path in (run, run / "checkpoint_7", run / "checkpoint_7" / "checkpoint"):
        assert AutoConfig.from_pretrained(path).d_model == 8
        assert AutoTokenizer.from_pretrained(path).decode([191, 173]).strip()
        assert abstract_model(path).config.d_model == 8
        loaded, _ = jaxllm.load(path, quantize="int8")
        assert loaded.config.d_model == 8


def test_a_job_notices_other_arrays(unpack: Callable[[str], Path]) -> None:
    for name, file in [
        ("t5_1_0", "target.encoder.encoder_norm.scale/0"),
        ("t5_1_1_inline", "checkpoint"),
        ("t5_1_1_orbax", "state/manifest.ocdbt"),
    ]:
        run = unpack(name)
        before = checkpoint_digests(run)
        assert checkpoint_digests(run / "checkpoint_7") == before
        path = run / "checkpoint_7" / file
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        after = checkpoint_digests(run)
        assert {part for part in before if before[part] != after[part]} == {"model weights"}


def test_export_writes_a_hugging_face_folder(
    unpack: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mt5_tied", "umt5_scanned_orbax"):
        run = unpack(name)
        shutil.copy(DATA / "tokenizers" / "t5.model", run / "spiece.model")
        assert export([str(run / "checkpoint_7"), str(tmp_path / f"{name}_hf")]) == 0
        model, tokenizer = jaxllm.load(tmp_path / f"{name}_hf")
        check_logits(model, name)
        assert tokenizer is not None
    assert "UMT5ForConditionalGeneration" in capsys.readouterr().out


def test_the_bytes_of_two_arrays_with_one_path(tmp_path: Path) -> None:
    array = b"\xc7\x0d\x01\x93\x91\x01\xa7float32\xc4"  # one float32, cut off
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa6target\x82\xa3a/b\x01\xa1a\x81\xa1b\x01")
    with pytest.raises(CheckpointError, match="'a/b': two arrays have this name"):
        T5XView(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa6target\x81\xa1a" + array)
    with pytest.raises(CheckpointError, match="incomplete download"):
        T5XView(tmp_path / "checkpoint")


def test_the_bytes_of_all_paths_are_bounded(tmp_path: Path) -> None:
    key = b"\xd9\xff" + b"x" * 255
    leaves = b"\xdf" + (40_000).to_bytes(4, "big")
    leaves += b"".join(b"\xa5%05d\x01" % number for number in range(40_000))
    data = b"\x81\xa6target" + b"".join(b"\x81" + key for _ in range(3)) + leaves
    (tmp_path / "checkpoint").write_bytes(data)
    with pytest.raises(CheckpointError, match="is beyond 16777216 bytes of names"):
        T5XView(tmp_path / "checkpoint")


def test_models_that_are_no_t5(tmp_path: Path) -> None:
    data = b"\x93\x91\x01\xa7float32\xc4\x04\0\0\x80?"
    leaf = b"\xc7" + bytes([len(data)]) + b"\x01" + data
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa6target\x81\xa7encoder\x81\xa3mlp" + leaf)
    with pytest.raises(UnsupportedError, match="'encoder/mlp' is no part of a T5"):
        T5XView(tmp_path / "checkpoint")
