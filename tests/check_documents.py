"""Check that what the documents name exists, and that they stay short.

    python -m tests.check_documents

Prints a line for each finding; the exit code is 1 if there is one. It reads sources and does not run commands.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from cosyvoice_triton import config
from cosyvoice_triton.speech_service.bodies import SpeechRequest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "common" / "cosyvoice_triton"
MAX_WORDS, MAX_README_WORDS, MAX_PAGES, MAX_TERMS = 30_000, 1_100, 15, 15
MAX_LINE = 120  # rows of tables may be longer
OF_TRITON = "doesn't support models with decoupled transaction policy"  # a message that is not ours

Findings = Iterator[str]


@cache
def texts(patterns: str) -> dict[Path, str]:
    """Return the files of the repository of these names, committed or about to be, with their text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns.split()]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in sorted(names) if (ROOT / name).exists()}


def pages() -> dict[Path, str]:
    return texts("*.md")


def sources() -> dict[Path, str]:
    """Return the text of everything that may name a page or define what a page names."""
    return texts("*.py *.sh *.yml *.yaml *.conf *.js *.html Makefile Dockerfile* .env.example pyproject.toml")


def of_this_version() -> list[tuple[Path, str]]:
    """Return the pages without the changelog, which names what earlier versions had."""
    return [(path, text) for path, text in pages().items() if path.name != "CHANGELOG.md"]


def page(name: str) -> str:
    return pages()[ROOT / name]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the headings of a page as GitHub writes them in links."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def cells(text: str) -> set[str]:
    """Return what stands in code in the tables of a page, without labels and values."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    return {re.split(r"[{= ]", code)[0] for code in re.findall(r"`([^`]+)`", rows)}


def too_long() -> Findings:
    words = {path: len(text.split()) for path, text in pages().items()}
    if (total := sum(words.values())) > MAX_WORDS:
        yield f"all pages have {total} words, {MAX_WORDS} at most"
    if words[ROOT / "README.md"] > MAX_README_WORDS:
        yield f"README.md has {words[ROOT / 'README.md']} words, {MAX_README_WORDS} at most"
    in_docs = [path for path in pages() if name_of(path).startswith("docs/") and path.parent.name != "recipes"]
    if len(in_docs) > MAX_PAGES:
        yield f"docs/ has {len(in_docs)} pages beside the recipes, {MAX_PAGES} at most"
    glossary = page("docs/architecture.md").split("## Glossary")[1]
    if (terms := len(re.findall(r"^\| ", glossary, re.MULTILINE)) - 1) > MAX_TERMS:
        yield f"the glossary has {terms} terms, {MAX_TERMS} at most"
    for path, text in pages().items():
        for number, line in enumerate(text.splitlines(), start=1):
            if len(line) > MAX_LINE and not line.startswith("|") and "](http" not in line:
                yield f"{name_of(path)}:{number} has {len(line)} characters, {MAX_LINE} at most"


def links() -> Findings:
    for path, text in pages().items():
        for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)", without_code(text)):
            file = path.parent / target if target else path
            if not file.exists():
                yield f"{name_of(path)} links to {target}, which does not exist"
            elif heading and heading not in anchors(file.read_text(encoding="utf-8")):
                yield f"{name_of(path)} links to {target}#{heading}, and there is no such heading"


PATH = re.compile(
    r"(?<![\w./-])(?:common|demo_voice|deploy|docs|model_repo\w*|scripts|tests)/"
    r"[\w./-]*\.(?:py|md|sh|yml|yaml|conf|dot|proto|jsonl?|txt|wav|mp3)\b"
)


def files() -> Findings:
    """Files of the repository that pages name, and pages that code names, with their headings."""
    for path, text in of_this_version():
        for named in PATH.findall(text):
            if not (ROOT / named).exists():
                yield f"{name_of(path)} names {named}, which does not exist"
    for path, text in sources().items():
        if path == Path(__file__).resolve():
            continue
        for named, heading in re.findall(r"\b(docs/[\w/]+\.(?:md|svg|dot|png))(?:#([\w-]+))?", text):
            if not (ROOT / named).exists():
                yield f"{name_of(path)} names {named}, which does not exist"
            elif heading and heading not in anchors(page(named)):
                yield f"{name_of(path)} names {named}#{heading}, and there is no such heading"


def path_of_a_chunk() -> Findings:
    """The files of the architecture's steps, and the functions and classes that it names after a file."""
    text = page("docs/architecture.md")
    steps = text.split("## The path of a chunk")[1].split("\n## ")[0]
    for file, names in re.findall(r"`([\w/]+\.py)`((?: `[\w.]+`)*)", " ".join(steps.split())):
        if not (PACKAGE / file).exists():
            yield f"the path of a chunk names {file}, which does not exist"
            continue
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for name in re.findall(r"[\w.]+", names.replace("`", "")):
            for part in name.split("."):
                if not re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.MULTILINE):
                    yield f"the path of a chunk names {name} in {file}, which does not define {part}"
    for row in re.findall(r"^\| (`[^|]+) \|", page("AGENTS.md"), re.MULTILINE):
        for name in re.findall(r"`([\w/]+(?:\.py)?)`", row):
            if not (PACKAGE / name).exists() and not list(PACKAGE.glob(f"*/{name}")):
                yield f"AGENTS.md names {name}, which does not exist"


def layers() -> Findings:
    """The table of packages is the linter's list of layers."""
    listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split('containers = ["cosyvoice_triton"]')[1]
    rows = re.findall(r'^    "([\w |]+)",$', listed.split("layers = [")[1].split("]")[0], re.MULTILINE)
    expected = [set(row.split(" | ")) for row in rows]
    table = page("docs/architecture.md").split("## Packages")[1].split("\n## ")[0]
    stated = [set(re.findall(r"`(\w+)/?`", row)) for row in re.findall(r"^\| \d+ \| ([^|]+) \|$", table, re.MULTILINE)]
    if stated != expected:
        yield f"the table of packages in docs/architecture.md differs from the layers in pyproject.toml: {expected}"


def tensors_and_models() -> Findings:
    section = page("docs/architecture.md").split("## Models and tensors")[1].split("\n## ")[0]
    templates = [path for path in ROOT.glob("**/model_repo*/*/config.pbtxt") if ".venv" not in path.parts]
    for template in templates:
        model, text = template.parent.name, template.read_text(encoding="utf-8")
        for name in ("README.md", "docs/architecture.md", "docs/architecture.dot"):
            if not re.search(rf"\b{model}\b", (ROOT / name).read_text(encoding="utf-8")):
                yield f"{name} does not name the model {model}"
        tensors = set(re.findall(r'\{ name: "(\w+)" data_type', text))
        if model != "tensorrt_llm":  # its other tensors are those of the TensorRT-LLM backend
            for tensor in sorted(tensors):
                if f"`{tensor}`" not in section:
                    yield f"docs/architecture.md does not name the tensor {tensor} of {model}"


def code_of(text: str) -> str:
    """Return the blocks of code and the inline code of a page, a command on each line."""
    joined = re.sub(r"\\\n\s*", " ", text)
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", joined, re.MULTILINE | re.DOTALL)
    shell = [block for language, block in blocks if not language]
    return "\n".join([*shell, *re.findall(r"`([^`]+)`", " ".join(without_code(joined).split()))])


def commands() -> Findings:
    """Make targets, subcommands and modules that pages name exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    listed = (PACKAGE / "cli" / "__init__.py").read_text(encoding="utf-8")
    subcommands = set(re.findall(r'"([a-z][\w-]*)": (?:Command)?\(', listed))
    for path, text in of_this_version():
        code = code_of(text)
        unknown = [f"make {name}" for name in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE) if name not in targets]
        named = re.findall(r"\bcosyvoice-triton ([a-z][\w-]*)", code)
        unknown += [f"cosyvoice-triton {name}" for name in named if name not in subcommands]
        for module in re.findall(r"python3? -m ((?:cosyvoice_triton|demo_voice|scripts|tests)[\w.]*)", code):
            file = (ROOT / "common" if module.startswith("cosyvoice_triton") else ROOT) / module.replace(".", "/")
            if not (file / "__main__.py").exists() and not file.with_suffix(".py").exists():
                unknown.append(f"python -m {module}")
        yield from (f"{name_of(path)} names {command}, which does not exist" for command in unknown)


def options_of_commands() -> Findings:
    """Options in commands of this project are defined by one of its programs."""
    defined = "\n".join(text for path, text in sources().items() if path.suffix in (".py", ".sh"))
    for path, text in of_this_version():
        for line in code_of(text).splitlines():
            if re.match(r"(?:cosyvoice-triton|python3? -m (?:cosyvoice_triton|demo_voice|tests)) ", line):
                for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", line.split("#")[0]):
                    if option != "--help" and f'"{option}"' not in defined:
                        yield f"{name_of(path)} names the option {option}, which no program has: {line.strip()}"


def settings() -> Findings:
    """Settings that pages give exist, and every one that is for users is in a page."""
    models = [
        value for value in vars(config).values() if isinstance(value, type) and issubclass(value, config.ModelConfig)
    ]
    known = {key for model in models for key in model.parameters()} | {field.name for field in fields(config.HopConfig)}
    known |= {key for template in ROOT.glob("**/model_repo*/*/config.pbtxt") for key in
              re.findall(r"\$\{(\w+)\}", template.read_text(encoding="utf-8"))}  # fmt: skip
    text = "\n".join(pages().values())
    for key in sorted(set(re.findall(r"--set (\w+)=", text)) - {"KEY"} - known):
        yield f"--set {key}= is given in a page, and there is no such setting"
    # Options of `render` give these, and its help explains them.
    by_options = {"model_dir", "llm_tokenizer_dir", "tokenizer_dir", "instance_kind", "gpt_model_path", "engine"}
    by_options |= {"llm_transport", "llm_urls", "llm_model", "llm_backend"}
    for key in sorted({key for model in models for key in model.parameters()} - by_options):
        if not re.search(rf"`[^`]*\b{key}\b", text):
            yield f"no page names the setting {key}"


def metrics() -> Findings:
    defined = "\n".join(
        (PACKAGE / "monitoring" / name).read_text(encoding="utf-8") for name in ("metrics.py", "health.py")
    )
    models = set(re.findall(r'"(tts_\w+)"', defined))
    stated = {name for name in cells(page("docs/deploy.md")) if name.startswith("tts_")}
    yield from (f"docs/deploy.md does not name the metric {name}" for name in sorted(models - stated))
    for path, text in of_this_version():
        for name in sorted(set(re.findall(r"\btts_\w+", text)) - models - {"tts_text"}):
            yield f"{name_of(path)} names the metric {name}, which does not exist"
    service = (PACKAGE / "speech_service" / "metrics.py").read_text(encoding="utf-8")
    exported = set(re.findall(r'"(speech_\w+)"', service))  # prometheus_client appends _total to counters
    stated = {name.removesuffix("_total") for name in cells(page("docs/http.md")) if name.startswith("speech_")}
    yield from (f"docs/http.md and the service differ in the metric {name}" for name in sorted(exported ^ stated))


def requests() -> Findings:
    """Fields and parameters of a request are in the tables."""
    for field in SpeechRequest.model_fields:
        if field not in cells(page("docs/http.md")):
            yield f"docs/http.md does not name the field {field}"
    source = (PACKAGE / "orchestrator" / "request.py").read_text(encoding="utf-8")
    known = source.split("\n_SAMPLING_KINDS")[1].split("\n_TRITONS_OWN")[0]
    for parameter in re.findall(r'(?<!: )"(\w+)"', known):
        if parameter not in cells(page("docs/clients.md")):
            yield f"docs/clients.md does not name the parameter {parameter}"


def options_of_the_speech_service() -> Findings:
    stated: set[str] = set()
    for names in re.findall(r"^\| (`--[^|]+) \|", page("docs/http.md").split("## Running it")[1], re.MULTILINE):
        stated |= set(re.findall(r"`--(\w+)`", names))
    source = "\n".join(text for path, text in sources().items() if path.parent == PACKAGE / "speech_service")
    for name in sorted(stated):
        if not re.search(rf"\b{name}\b", source):
            yield f"docs/http.md names the option --{name}, which the service does not have"


def messages() -> Findings:
    """Messages that the pages for operators quote are in the code, apart from what they name."""
    said = " ".join(
        "\n".join(text for path, text in sources().items() if not name_of(path).startswith("tests/")).split()
    )
    for name in ("docs/troubleshooting.md", "docs/operate.md"):
        for quoted in re.findall(r'"([^"]+)"', without_code(page(name))):
            for part in quoted.split("…"):
                if (words := part.strip()) and words not in said and words not in OF_TRITON:
                    yield f"{name} quotes {words!r}, which no message says"


def picture() -> Findings:
    svg = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    for label in re.findall(r"<b>([^<]+)</b>", (ROOT / "docs" / "architecture.dot").read_text(encoding="utf-8")):
        if f">{label}</text>" not in svg:
            yield f"docs/architecture.svg lacks {label!r}: make pictures"


CHECKS: tuple[Callable[[], Findings], ...] = (
    too_long, links, files, path_of_a_chunk, layers, tensors_and_models, commands, options_of_commands, settings,
    metrics, requests, options_of_the_speech_service, messages, picture,
)  # fmt: skip


def main() -> int:
    findings = [finding for check in CHECKS for finding in check()]
    print("\n".join(findings) or f"documents: {len(pages())} pages, nothing to mend", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
