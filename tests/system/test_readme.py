"""Everything that documents and messages name exists: files, links, make targets, options, models, tensors."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cosyvoice_triton.config import OrchestratorConfig, SpeakerEmbeddingConfig, TensorrtLLMConfig, Token2WavConfig
from cosyvoice_triton.monitoring import health, metrics
from cosyvoice_triton.orchestrator.request import _PARAMETERS as REQUEST_PARAMETERS
from cosyvoice_triton.server.rendering import placeholders, settings_to_add
from cosyvoice_triton.speech_service.command import build_parser
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.routes.bodies import SpeechRequest

from tests.conftest import ROOT
from tests.support.help_texts import LAUNCHERS, PROGRAMS, explanations
from tests.system.test_architecture import LIBRARY, MODELS, name_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [
    ROOT / "deploy" / "nginx" / "gateway.d" / "README.md",
    ROOT / "tools" / "demo_model" / "trained" / "README.md",
]
SCRIPTS = [path for path in sorted((ROOT / "scripts").iterdir()) if path.suffix in (".py", ".sh")]
SHELL = [path for path in SCRIPTS if path.suffix == ".sh"]
MAKEFILE = (ROOT / "Makefile").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

# A path of this repository in prose: with a folder and a suffix.
PATH = re.compile(
    r"\b(?:common|deploy|docs|model_repo(?:_dit)?|scripts|tests|tools)/[\w./-]*\.(?:py|md|sh|yml|yaml|conf|dot|proto|json|jsonl|txt|wav)\b"
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub writes them in links."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*\.md)?#([^)]+)\)", text_of(page))
    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [path for path in PATH.findall(text_of(page)) if not (ROOT / path).exists()] == []


def test_every_page_that_code_names_exists() -> None:
    sources = [*LIBRARY, *MODELS, *SCRIPTS, *ROOT.glob("*.yml"), *(ROOT / "deploy").rglob("*.y*ml")]
    sources += [ROOT / name for name in (".env.example", "Dockerfile.server", "Makefile", "pyproject.toml")]
    named = {(name_of(path), page) for path in sources for page in re.findall(r"\bdocs/[\w/]+\.\w+", path.read_text())}
    assert named and {(file, page) for file, page in named if not (ROOT / page).exists()} == set()


def definitions(path: Path) -> set[str]:
    """Functions, classes and `Class.method` of a file; a model's methods also without their class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
            found |= {node.name, *methods, *(f"{node.name}.{method}" for method in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_the_path_of_a_chunk_names_existing_functions() -> None:
    section = ARCHITECTURE.split("## The path of a chunk")[1].split("\n## ")[0]
    steps = re.findall(r"`([\w/]+\.py)`((?:,? `[\w.]+`)+)", " ".join(section.split()))
    assert len(steps) > 20
    for file, names in steps:
        path = ROOT / (file if file.startswith("model_repo") else f"common/{file}")
        assert {name for name in re.findall(r"`([\w.]+)`", names)} - definitions(path) == set(), file


def test_every_class_that_the_architecture_names_exists() -> None:
    classes = {name for path in LIBRARY for name in definitions(path)}
    named = set(re.findall(r"`([A-Z][a-z]\w*)(?:\.\w+)?`", ARCHITECTURE))
    assert named - classes == {"ModelInfer", "ModelStreamInfer"}  # calls of Triton's gRPC service


def test_every_model_is_named_in_the_readme_and_the_architecture() -> None:
    models = {path.parents[1].name for path in MODELS}
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.dot"):
        assert {model for model in models if not re.search(rf"\b{model}\b", text_of(page))} == set(), page


def test_the_clients_versions_are_those_that_the_recipes_install() -> None:
    folder = ROOT / "tests" / "recipes"
    installed = dict(re.findall(r"^([\w-]+)==(.+)$", (folder / "constraints.txt").read_text(), re.MULTILINE))
    installed |= json.loads((folder / "package.json").read_text())["dependencies"]
    rows = text_of(ROOT / "docs" / "results" / "clients.md").split("| package | version |")[1].split("\n\n")[0]
    stated = re.findall(r"^\| ([^|]+) \| ([\d.]+) \|$", rows, re.MULTILINE)
    assert len(stated) > 7
    for names, version in stated:
        for name in names.removesuffix(" (Python)").split(", "):
            assert installed[name] == version, name


def test_the_table_of_models_has_every_tensor() -> None:
    """Except for `tensorrt_llm`, whose tensors are those of the TensorRT-LLM backend: the table lists some of them."""
    section = ARCHITECTURE.split("## Models and tensors")[1].split("\n## ")[0]
    for path in MODELS:
        model = path.parents[1].name
        template = (path.parents[1] / "config.pbtxt").read_text()
        tensors = set(re.findall(r'\{ name: "(\w+)" data_type', template))
        if model != "tensorrt_llm":
            assert {tensor for tensor in tensors if f"`{tensor}`" not in section} == set(), model
        else:
            row = next(line for line in section.splitlines() if line.startswith("| `tensorrt_llm`"))
            assert {name for name in re.findall(r"`(\w+)`", row) if name not in tensors | {model}} == set()


def cells(page: str) -> set[str]:
    """What stands in code in the tables of a page, without labels and values."""
    rows = "\n".join(line for line in text_of(ROOT / page).splitlines() if line.startswith("|"))
    return {re.split(r"[{= ]", code)[0] for code in re.findall(r"`([^`]+)`", rows)}


def test_the_tables_of_metrics_have_those_of_the_code_and_no_others() -> None:
    values = [*vars(metrics).values(), *vars(health).values()]
    models = {one.name for one in values if isinstance(one, metrics.Metric)}
    assert {name for name in cells("docs/deployment.md") if name.startswith("tts_")} == models
    page = Metrics().page().decode()
    service = {name for name in re.findall(r"^# TYPE (\S+)", page, re.MULTILINE) if not name.endswith("_created")}
    assert {name for name in cells("docs/http.md") if name.startswith("speech_")} == service


def test_every_field_and_parameter_of_a_request_is_documented() -> None:
    assert SpeechRequest.model_fields.keys() - cells("docs/http.md") == set()
    prose = text_of(ROOT / "README.md").split("Optional request parameters:")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", prose)) - {"cosyvoice2", "triton", "speaker"} == REQUEST_PARAMETERS


def test_the_table_of_the_speech_services_options_has_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPEECH_")]:
        monkeypatch.delenv(name)
    section = text_of(ROOT / "docs" / "http.md").split("## Running it")[1]
    stated: dict[str, str] = {}
    for names, values in re.findall(r"^\| (`--.+?) \| (.+?) \|", section, re.MULTILINE):
        options = re.findall(r"`(--\w+)`", names)
        stated |= dict(zip(options, values.split(", ") if len(options) > 1 else [values], strict=True))
    defaults = {one.option_strings[0]: one.default for one in build_parser("")._actions if one.dest != "help"}
    assert stated.keys() == defaults.keys()
    for option, value in defaults.items():
        if isinstance(value, int | float | Path):
            assert stated[option].strip("`") == (f"{value:g}" if isinstance(value, float) else str(value)), option


def test_every_setting_that_is_given_exists_and_every_one_there_is_is_named() -> None:
    templates = [path.parents[1] / "config.pbtxt" for path in MODELS]
    keys = {key for path in templates for key in (*placeholders(text_of(path)), *settings_to_add(text_of(path)))}
    text = "\n".join(text_of(page) for page in PAGES if page.parent.name != "results")  # these name earlier ones, too
    given = set(re.findall(r"--set (\w+)=", text)) - {"KEY"}
    assert len(given) > 10 and given <= keys
    # Those that options of cosyvoice_triton.cli.render give are explained by its help.
    configs = (SpeakerEmbeddingConfig, TensorrtLLMConfig, Token2WavConfig, OrchestratorConfig)
    by_options = {"model_dir", "llm_tokenizer_dir", "tokenizer_dir", "instance_kind", "gpt_model_path", "engine"}
    by_options |= {"llm_transport", "llm_urls", "llm_model", "llm_backend"}
    settings = {key for config in configs for key in config.parameters()} - by_options
    assert {key for key in settings if not re.search(rf"`[^`]*\b{key}\b", text)} == set()


def test_the_diagram_is_rendered_from_its_source() -> None:
    picture = text_of(ROOT / "docs" / "architecture.svg")
    labels = re.findall(r"<b>([^<]+)</b>", text_of(ROOT / "docs" / "architecture.dot"))
    assert len(labels) > 10 and [label for label in labels if f">{label}</text>" not in picture] == []


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    sources = [*PAGES, *SCRIPTS, *LIBRARY]
    named = {match for path in sources for match in re.findall(r"(?:`|run: |\n)make ([a-z-]+)", path.read_text())}
    assert named and named <= targets


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_runs_as_a_file_from_any_directory(launcher: str) -> None:
    help_text = explanations("file")[launcher]
    assert "usage:" in help_text and len(help_text) > 200, help_text


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_runs_as_a_module(program: str) -> None:
    help_text = explanations("module")[program]
    assert "usage:" in help_text and len(help_text) > 200, help_text


def test_every_program_is_named_in_a_document() -> None:
    """Except for those that a make target or a document runs in another form, and a stub of the tests."""
    others = {
        "scripts.check_machine",
        "cosyvoice_triton.cli.demo",
        "tests.parity",
        "tests.soak",
        "cosyvoice_triton.speech_service",
    }
    others |= {"cosyvoice_triton.prepare.share_tensorrt", "tests.support.triton_stub"}
    text = "\n".join(map(text_of, PAGES))
    assert {name for name in PROGRAMS if not re.search(rf"\b{re.escape(name)}\b(?!\.\w)", text)} - others == set()


def test_a_launcher_runs_as_a_file_in_a_separate_process(tmp_path: Path) -> None:
    """One real process, because the tests above only imitate the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / "scripts" / "client_grpc.py", "--help"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0 and "--reference-audio" in finished.stdout, finished.stderr


def test_the_check_of_the_machine_needs_no_packages() -> None:
    """-S: without site-packages, as the system's own Python before `make setup`."""
    command = [sys.executable, "-S", "-m", "scripts.check_machine", "--disk", "0"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


def test_make_serve_takes_settings_and_looks_at_its_ports_before_it_installs_or_renders() -> None:
    """With the system's own Python, as before `make setup`. Port 0 is always free."""
    ports = {name: "0" for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "HEALTH_PORT")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = [f"{name}={value}" for name, value in (ports | {"SPEECH_PORT": str(port)}).items()]
        command = ["make", "serve", f"PYTHON={sys.executable} -S", "MODELS=nowhere", *given]
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and f"port {port} is in use" in refused.stderr
    assert "render" not in refused.stdout and "nowhere" not in refused.stderr
    planned = ["make", "-n", "render", "SET=max_streams=4 first_hop_tokens=10"]
    shown = subprocess.run(planned, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "--set max_streams=4 --set first_hop_tokens=10" in shown.stdout


@pytest.mark.parametrize("package", ["pocketsphinx"])
def test_programs_explain_themselves_without_the_packages_of_the_tests(package: str) -> None:
    without = f"import sys; sys.modules[{package!r}] = None; from demo_voice.evaluation.__main__ import main; "
    command = [sys.executable, "-c", without + "main(['--help'])"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "usage:" in shown.stdout, shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_of_the_documented_commands_are_in_their_help(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", text_of(page))
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"python3? -m ((?:scripts|tools)\.[\w.]+)([^`\n]*)", blocks)
    commands += re.findall(r"`\S*python3? -m ((?:scripts|tools)\.[\w.]+)([^`]*)`", text)
    for program, arguments in commands:
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"&&.*", "", arguments))) - {"--help"}
        assert {option for option in options if option not in explanations("module")[program]} == set(), program


@pytest.mark.parametrize("page", [*PAGES, *SHELL], ids=name_of)
def test_programs_are_started_as_modules(page: Path) -> None:
    """With one exception: the README's sentence about running a launcher as a file, as upstream does."""
    assert re.findall(r"^python3? -m (?:scripts|tests|tools)\b.*", text_of(page), re.MULTILINE) == [], (
        "the packages are in .venv"
    )
    found = re.findall(r"(?:python3?|PYTHON\}?\"?) (?:scripts|tools)/[\w/]+\.py", text_of(page))
    assert found == (
        ["python3 common/cosyvoice_triton/cli/client_grpc.py"]
        if page.name == "README.md" and page.parent == ROOT
        else []
    )
