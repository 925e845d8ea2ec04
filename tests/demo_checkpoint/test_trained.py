"""The committed trained checkpoint is complete, small and without executable content, and the demo installs it."""

import filecmp
import json
import pickletools
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import MANIFEST, STACKS, TRAINED, VOICES_DIR
from cosyvoice_triton.prepare import demo
from cosyvoice_triton.prepare.demo import SUMS, copy_demo
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.encoders import SpeakerEncoder
from cosyvoice_triton.voice.prompt import Recording, validate_reference
from cosyvoice_triton.voice.silent_tokens import FILE as SILENT_TOKENS

from demo_voice.training import export
from tests.support.checkpoints import LLM_DIR, UNET_DIR

VOICES = ("alpha", "gongitsune", "kumo", "nezumi")
MAX_BYTES = 60 * 10**6  # of all files together, since they are in every clone
LLM = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
OFFICIAL = {
    **{stack.llm.directory: LLM for stack in STACKS},
    **{str(stack.checkpoint): {*stack.files, SILENT_TOKENS} for stack in STACKS},
    VOICES_DIR: {f"{name}.{kind}" for name in VOICES for kind in ("txt", "wav")},
}
# The globals in a pickle that torch.save writes for a dict of tensors.
HARMLESS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch FloatStorage", "torch HalfStorage"}


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    assert copy_demo(tmp_path / "demo")
    return tmp_path / "demo"


def test_a_copy_has_the_official_layout_and_its_checksums_and_the_repository_each_file_once(ready: Path) -> None:
    (ready / MANIFEST).unlink()
    assert set(export.files_of(ready)) == {f"{room}/{name}" for room in OFFICIAL for name in OFFICIAL[room]}
    done = subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=ready, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert sum(path.stat().st_size for path in TRAINED.rglob("*") if path.is_file()) <= MAX_BYTES
    export.write_sums(ready)
    assert (ready / SUMS).read_bytes() == (TRAINED / SUMS).read_bytes()
    export.remove_copies(ready)
    assert export.files_of(ready) == export.files_of(TRAINED)


@pytest.mark.parametrize("path", sorted(TRAINED.rglob("*.pt")), ids=lambda path: path.parent.name + "-" + path.stem)
def test_no_pickle_refers_to_executable_code(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith(".pkl"))
        operations = list(pickletools.genops(archive.read(pickled)))
    named = {argument for operation, argument, _ in operations if operation.name == "GLOBAL"}
    assert named and named <= HARMLESS
    assert not {operation.name for operation, _, _ in operations} & {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ"}


def test_the_other_formats_contain_only_data() -> None:
    for path in TRAINED.rglob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert {opset.domain for opset in model.opset_import} <= {"", "ai.onnx"}, path
        assert {node.domain for node in model.graph.node} == {""} and not model.functions, path
        assert all(tensor.data_location == onnx.TensorProto.DEFAULT for tensor in model.graph.initializer), path
    with safetensors.safe_open(TRAINED / LLM_DIR / "model.safetensors", "np") as weights:
        assert weights.keys()
    for path in TRAINED.rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))


def test_the_voices_are_valid_references_and_distinguishable() -> None:
    recordings = [load_audio(TRAINED / VOICES_DIR / f"{name}.wav", PROMPT_SAMPLE_RATE) for name in VOICES]
    for recording in recordings:
        validate_reference(recording[None])
    halves = [half for recording in recordings for half in np.array_split(recording, 2)]
    vectors = np.stack(SpeakerEncoder(TRAINED / UNET_DIR)(halves))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    alike = vectors @ vectors.T
    assert min(alike[0, 1], alike[2, 3]) > alike[:2, 2:].max()


def test_all_voices_are_registered_with_their_transcripts() -> None:
    book = VoiceBook(TRAINED / VOICES_DIR, TRAINED, str)
    assert book.names() == list(VOICES)
    for name in VOICES:
        voice = book.get(name)
        assert isinstance(voice, Recording) and len(voice.text.split()) > 5


# --- installation ------------------------------------------------------------------------------------------------


def test_a_complete_copy_is_kept(ready: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in ready.rglob("*")}
    assert not copy_demo(ready)
    assert {path: path.stat().st_mtime_ns for path in ready.rglob("*")} == before


def test_what_is_missing_or_damaged_is_copied_again_and_registered_voices_stay(ready: Path) -> None:
    voices, computed = ready / VOICES_DIR, ready / stacks.DIT.llm.genai
    computed.mkdir()
    (voices / "anna.safetensors").write_bytes(b"computed")
    (voices / "uploaded.safetensors").write_bytes(b"recorded")
    (voices / "anna.wav").write_bytes(b"recorded")
    (voices / "nezumi.wav").unlink()
    (ready / UNET_DIR / "flow.pt").write_bytes(b"truncated")
    assert copy_demo(ready)
    assert filecmp.cmp(voices / "nezumi.wav", TRAINED / VOICES_DIR / "nezumi.wav", shallow=False)
    assert filecmp.cmp(ready / UNET_DIR / "flow.pt", TRAINED / UNET_DIR / "flow.pt", shallow=False)
    assert (voices / "anna.wav").read_bytes() == b"recorded" and (voices / "anna.safetensors").is_file()
    (ready / SUMS).write_text(f"{'0' * 64}  {UNET_DIR}/flow.pt\n")  # those of another version
    assert copy_demo(ready) and (ready / SUMS).read_bytes() == (TRAINED / SUMS).read_bytes()
    assert (voices / "anna.wav").is_file() and not (voices / "anna.safetensors").exists() and not computed.exists()
    assert (voices / "uploaded.safetensors").read_bytes() == b"recorded", "the only file of a voice"


def test_other_directories_are_refused(tmp_path: Path, demo_models: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no demo checkpoint"):
        copy_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="has random weights"):
        copy_demo(demo_models)


def test_a_damaged_file_of_the_package_is_named_and_nothing_is_written(tmp_path, monkeypatch) -> None:
    damaged = tmp_path / "trained"
    shutil.copytree(TRAINED, damaged)
    with (damaged / UNET_DIR / "hift.pt").open("r+b") as weights:
        weights.seek(1000)
        weights.write(b"worms")
    monkeypatch.setattr(demo, "TRAINED", damaged)
    (tmp_path / "demo").mkdir()
    with pytest.raises(ValueError, match=r"hift.pt is damaged"):
        copy_demo(tmp_path / "demo")
    assert not list((tmp_path / "demo").iterdir())
