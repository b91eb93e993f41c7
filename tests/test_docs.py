"""The examples of the pages and of the docstrings run."""

import doctest
import importlib
import json
import logging
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import torch

import hookgraph

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*.md")
    if "_build" not in path.parts and BLOCK.search(path.read_text(encoding="utf-8"))
)
FOOTNOTE = re.compile(r"^\[\^([\w-]+)\]: (.*)$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?`")
TABLE = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = sorted({"hookgraph", *(m.name for m in pkgutil.walk_packages(hookgraph.__path__, "hookgraph."))})


@pytest.fixture(autouse=True)
def no_residue():
    """A page shows training after ``detach``, which changes the module for good reason; other tests watch residue."""


@pytest.fixture(autouse=True)
def level_restored():
    """A page shows how to turn the log on."""
    log = logging.getLogger("hookgraph")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def small_qwen_image(monkeypatch):
    """Stand in for the download of 55 GB: the real pipeline class with small random parts.

    The text encoder is left out; a prompt becomes random embeddings of as many tokens as it has words.
    """
    diffusers = pytest.importorskip("diffusers", reason="needs the extra: pip install 'hookgraph[models]'")

    class SmallQwenImagePipeline(diffusers.QwenImagePipeline):
        def _get_qwen_prompt_embeds(self, prompt, device=None, dtype=None):
            words = [one.split() for one in ([prompt] if isinstance(prompt, str) else prompt)]
            length = max(map(len, words))
            mask = torch.tensor([[position < len(one) for position in range(length)] for one in words])
            return torch.randn(len(words), length, 16).to(device, self.transformer.dtype), mask.long().to(device)

    def from_pretrained(name, torch_dtype=torch.float32):
        assert name == "Qwen/Qwen-Image"
        transformer = diffusers.QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
        )  # fmt: skip
        vae = diffusers.AutoencoderKLQwenImage(
            base_dim=2, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        )  # fmt: skip
        pipe = SmallQwenImagePipeline(
            transformer=transformer.eval(), vae=vae.eval(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            text_encoder=None, tokenizer=None,
        )  # fmt: skip
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(torch_dtype)

    monkeypatch.setattr(diffusers.QwenImagePipeline, "from_pretrained", from_pretrained)


def run_page(page):
    """Run the blocks of one page in order in one namespace, as a reader would type them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    namespace = {"__name__": "__page__"}
    for match in BLOCK.finditer(text):
        # Blank lines in front make a traceback name the line of the page.
        above = text.count("\n", 0, match.start(1))
        exec(compile("\n" * above + match[1], str(ROOT / page), "exec"), namespace)


def without_measures(text):
    """Times and sizes differ from machine to machine; counts, words and columns do not."""
    return [re.sub(r" +[\d,]+\.\d+", " #", line) for line in text.splitlines()]


@pytest.mark.filterwarnings("ignore::hookgraph.HookgraphWarning")  # some examples show a limit being reached
@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page):
    run_page(page)


@pytest.mark.usefixtures("small_qwen_image")
def test_readme_runs_and_prints_its_table(capsys):
    run_page("README.md")
    printed = without_measures(capsys.readouterr().out)
    (table,) = TABLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    if not torch.cuda.is_available():  # the README shows what a machine without a GPU prints
        assert printed[: len(table.splitlines())] == without_measures(table)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_reasons_page_has_every_reason_with_its_words():
    """The table stands in the file, so that a reader of the repository has it, too."""
    page = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    rows = [f"| `{reason.value}` | {reason.meaning} | {reason.remedy} |" for reason in hookgraph.FallbackReason]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


def test_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\.\. auto\w+:: hookgraph\.(\w+)", page, re.MULTILINE))
    assert shown == set(hookgraph.__all__) - {"__version__"}


def test_there_are_pages_with_examples():
    assert {"docs/quickstart.md", "docs/how_it_works.md", "docs/guides/services.md"} <= set(PAGES)


# -- docs/limits.md: each statement is backed by tests ------------------------------------------------

LIMITS = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").partition("\n## Backed by\n")


def statements():
    """Each row of the table, and each paragraph that begins with a bold sentence."""
    rows = re.findall(r"^\| (?!what \|)(.+)$", LIMITS[0], re.MULTILINE)
    return [*rows, *(part for part in LIMITS[0].split("\n\n") if part.startswith("**"))]


@pytest.mark.parametrize("statement", statements(), ids=lambda text: text[:40])
def test_each_limit_names_its_tests(statement):
    (mark,) = re.findall(r"\[\^([\w-]+)\]", statement)
    backing = dict(FOOTNOTE.findall(LIMITS[2]))
    named = TEST.findall(backing[mark])
    assert len(named) == backing[mark].count("::") > 0
    for path, function, case in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), f"{path} has no {function}"
        assert not case or f'"{case}"' in source, f"{path} has no case {case}"


def test_each_footnote_of_the_limits_is_used():
    assert {mark for mark, _ in FOOTNOTE.findall(LIMITS[2])} == set(re.findall(r"\[\^([\w-]+)\]", LIMITS[0]))


def test_each_reason_of_the_table_exists():
    shown = {word for row in statements() if " | " in row for word in re.findall(r"`(\w+)`", row.split(" | ")[2])}
    assert shown <= {reason.value for reason in hookgraph.FallbackReason}
    assert len(shown) > 20


# -- figures --------------------------------------------------------------------------------------------


def test_no_page_names_a_result_that_is_not_there():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"results/(\w+\.json)", path.read_text(encoding="utf-8")):
            assert (ROOT / "docs" / "results" / name).exists(), f"{path} names {name}"


def test_figures_of_the_performance_page_are_those_of_the_files():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    gpu, cpu = (
        json.loads((ROOT / "docs" / "results" / name).read_text()) for name in ("zoo_h200.json", "perf_cpu.json")
    )
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    for case, eager, attached, ratio in rows:
        found = gpu["cases"][case]["bfloat16"]
        told = (found["eager_ms"]["median"], found["attached_ms"]["median"], found["speedup"])
        assert (eager, attached, ratio) == tuple(f"{value:.2f}" for value in told), case
    micros = re.findall(r"`(test_\w+(?:\[\d+\])?)`:? (?:\| )?([\d.]+) (?:µs|\|)", page.replace("\n", " "))
    for case, told in micros:
        assert told == f"{cpu['median_us'][case]['median']:.1f}", case
    assert (len(rows), len(micros)) == (14, 13)


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "scripts" / "call_path.py"))["draw"]()
    assert (ROOT / "docs" / "_static" / "call_path.svg").read_text(encoding="utf-8") == drawn
