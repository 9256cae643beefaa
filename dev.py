"""Set up and run this project with nothing but Python: ``python3 dev.py digits`` or ``test``.

It makes a virtual environment in ``.venv``, installs what is missing there, and runs the command in
it. It uses only the standard library, because it runs before anything is installed.

``python3 dev.py test-cuda-build`` uses the environment ``.venv-cuda``, which has a CUDA build of
torch, and runs the tests that need such a build but no device.

``python3 dev.py release`` builds the archives of a release in ``dist``. ``test-wheel oldest`` and
``test-wheel newest`` train with the wheel in a fresh environment with that stack.

``python3 dev.py test-oldest-lightning`` trains and resumes with the oldest supported Lightning, in
``.venv-oldest-lightning``, which takes all else from ``.venv``.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
# Resolved first, by its exact version: pip prefers a CPU build (2.13.0+cpu) if one of its indexes
# has one. Otherwise torch brings gigabytes of CUDA libraries; PIP_EXTRA_INDEX_URL can name an index
# of CPU builds. An installed torch >= 2.11 is kept.
TORCH = "torch==2.13.0"
# `===` compares the whole version, so that pip does not take a build 2.11.0+cpu of another index.
# PyPI's build for Linux is a CUDA build; this is the oldest torch that the metadata allows.
TORCH_CUDA = "torch===2.11.0"
CUDA_ENVIRONMENT = ".venv-cuda"
# The lower bound in the metadata.
OLDEST_LIGHTNING = "2.2.5"
OLDEST_LIGHTNING_ENVIRONMENT = ".venv-oldest-lightning"
# Of all that is private in Lightning most is used to resume.
OLDEST_LIGHTNING_TESTS = (
    "tests/control/data/test_loaders.py",
    "tests/lightning/logical_ranks/test_steps.py",
    "tests/lightning/resume/test_resume.py",
    "tests/lightning/resume/test_stateful_loaders.py",
    "tests/test_hooks.py",
)
# The lower bounds of the stack in the metadata.
OLDEST_STACK = ("torch==2.4.0", "numpy==1.26.0", f"lightning=={OLDEST_LIGHTNING}", "setuptools<81")
WHEEL_TRAINING = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_d9m import DeterminismCallback
L.seed_everything(1)
L.Trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=1, accelerator="cpu", logger=False,
          enable_checkpointing=False, callbacks=[DeterminismCallback()]).fit(BoringModel())
"""
# Horovod's kernels are compiled for this architecture if no device is present, and the user has not
# chosen any.
CUDA_ARCHITECTURE = "90"
OLDEST_PYTHON = (3, 10)
# `pip install` imports this; an interrupted upgrade of pip leaves only parts of it.
PIP = "pip._internal.commands.install"
# The files of slow tests start first (tests/conftest.py), so that both workers end together.
TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# Prints the digest of the weights with which a fit ended.
READ_DIGEST = """
import sys
from lightning_d9m import read_ledger
print(read_ledger(sys.argv[1]).outcome(0).final.totals["weights"][:16])
"""
README_DIGEST = r"portable digest is ([0-9a-f]{16})"
# There while the environment is being made.
UNFINISHED = ENVIRONMENT / "unfinished"


def say(text: str) -> None:
    """Print a headline."""
    print(f"\n== {text}", flush=True)


def execute(*words: object, quiet: bool = False, **environment: str) -> int:
    """Run a command in the project's folder; return an exit status.

    If it is to be quiet, its output is shown only if it fails.
    """
    bin_path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    variables = {**os.environ, "PATH": bin_path, "VIRTUAL_ENV": str(ENVIRONMENT), **environment}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=ROOT, env=variables, check=False, **output)
    if quiet and done.returncode:
        print(done.stdout.decode(errors="replace"), flush=True)
    return done.returncode if done.returncode >= 0 else 1


def run(*words: object, quiet: bool = False, **environment: str) -> None:
    """Run a command in the project's folder; exit with its status if it fails."""
    status = execute(*words, quiet=quiet, **environment)
    if status != 0:
        sys.exit(status)


def make_environment() -> None:
    """Make ``.venv``, or repair one that was interrupted or has no pip."""
    if ENVIRONMENT.exists() and (UNFINISHED.exists() or not works("sys")):
        remove_environment()
    if works(PIP):
        return
    say(f"making {ENVIRONMENT.relative_to(ROOT)}")
    make_by_venv()  # over one that exists and has no pip, this adds it
    if not works(PIP):
        remove_environment()
        make_by_venv()


def remove_environment() -> None:
    """Remove an environment that cannot be used."""
    say(f"{ENVIRONMENT.relative_to(ROOT)} is incomplete; making it again")
    shutil.rmtree(ENVIRONMENT)


def make_by_venv() -> None:
    """Run ``venv``, which Debian ships as a separate package."""
    if not ENVIRONMENT.exists():
        ENVIRONMENT.mkdir()
        UNFINISHED.touch()
    command = [sys.executable, "-m", "venv", str(ENVIRONMENT)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        install_debian("python3-venv")
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            sys.exit(f"dev.py: {' '.join(command)} ended with exit status {status}.")
    UNFINISHED.unlink(missing_ok=True)


def works(module: str) -> bool:
    """Return whether the environment's Python runs, is the environment's, and imports a module."""
    if not PYTHON.exists():
        return False
    code = f"import sys, {module}; sys.exit(sys.prefix == sys.base_prefix)"
    return (
        subprocess.run([PYTHON, "-I", "-c", code], check=False, capture_output=True).returncode == 0
    )


def install_debian(*packages: str) -> None:
    """Install Debian packages, or say how to."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        sys.exit(
            f"dev.py: missing: {' '.join(packages)}. Install: apt-get install {' '.join(packages)}"
        )
    say(f"installing Debian's {' '.join(packages)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "-qq", "update"], check=True, env=quiet)
    install = ["apt-get", "-qq", "-y", "install", "--no-install-recommends", *packages]
    subprocess.run(install, check=True, env=quiet)


def install(*groups: str, extra: str = "", torch: str = TORCH) -> None:
    """Install torch, this package (editable) and groups, once for each state of the metadata."""
    recipe = (ROOT / "pyproject.toml").read_bytes() + repr((groups, extra, sys.version)).encode()
    mark = ENVIRONMENT / f"installed-{'-'.join(groups) or 'package'}"
    state = hashlib.sha256(recipe).hexdigest()
    if mark.exists() and mark.read_text() == state:
        return
    say(f"installing into {ENVIRONMENT.relative_to(ROOT)} (some minutes the first time)")
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--upgrade", "pip>=25.1")  # the first with --group
    if not works("torch"):
        run(*pip, torch)
    run(
        *pip,
        "--editable",
        f".[{extra}]" if extra else ".",
        *(f"--group={group}" for group in groups),
    )
    mark.write_text(state)


def need_tools() -> None:
    """Install the compiler tools that Horovod's build needs."""
    packages = {"c++": "g++", "cmake": "cmake", "make": "make"}
    missing = [package for tool, package in packages.items() if shutil.which(tool) is None]
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("python3-dev")
    if missing:
        install_debian(*missing)


def digits(_: list[str]) -> None:
    """The main job: train on the digits twice, and compare portable bits with the README's."""
    install(extra="examples")
    run(ENVIRONMENT / "bin" / "d9m", "repeat", "-n", "2", "--", "python", "examples/digits.py")
    say("one epoch with portable bits, which are the same on every machine")
    with tempfile.TemporaryDirectory() as folder:
        portable = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_PORTABLE": "1"}
        portable["LIGHTNING_D9M_LEDGER_DIR"] = folder
        # Lightning prints tips, warnings and tables; what matters here is the verdict.
        run(PYTHON, "examples/digits.py", "--epochs", "1", quiet=True, **portable)
        command = (PYTHON, "-c", READ_DIGEST, Path(folder, "fit-000"))
        digest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    compare_with_readme(digest)


def compare_with_readme(digest: str) -> None:
    """Exit with 1 unless the README has this digest."""
    (expected,) = re.findall(README_DIGEST, (ROOT / "README.md").read_text())
    if digest != expected:
        sys.exit(
            f"dev.py: the portable digest is {digest} on this machine, and {expected} in the "
            "README. Please report both, with the output of `d9m doctor`."
        )
    print(f"\nequal: the portable digest is {digest}, as in the README.")


def check() -> None:
    """Check format, lint, types and import contracts."""
    say("format and lint")
    run("ruff", "format", "--check", ".")
    run("ruff", "check", ".")
    say("types")
    run("mypy")
    say("import contracts")
    run("lint-imports")


def test(arguments: list[str]) -> None:
    """All that CI checks: format, lint, types, import contracts, docs, tests."""
    need_tools()
    install("dev", "horovod", extra="examples")
    say("Horovod (built once, some minutes; then taken from a cache)")
    run(ENVIRONMENT / "bin" / "d9m", "install-horovod")
    check()
    say("documentation")
    # With --quiet no warning is counted, and --strict never fails.
    run("mkdocs", "build", "--strict", NO_MKDOCS_2_WARNING="1")
    if arguments:
        say("the tests that you named")
        run(PYTHON, "-m", "pytest", *arguments)
        return
    sites = ENVIRONMENT / "raise-sites"
    sites.write_text("")
    # In one argument: with two, pytest takes the file for a test folder before it knows the option.
    noted = f"--raise-sites={sites}"
    say("tests and doctests, two at once")
    # One thread each: those of two processes would wait for each other in every small operation.
    tested = execute(PYTHON, "-m", "pytest", noted, *TWO_AT_ONCE, OMP_NUM_THREADS="1")
    # Silent unless there is an error of ours that no test has made.
    sys.exit(max(tested, execute(PYTHON, "tests/raise_sites.py", sites)))


def test_quickly() -> None:
    """The checks and tests for everyday work."""
    install("dev", "horovod", extra="examples")
    check()
    say("fast tests, two at once")
    status = execute(
        *(PYTHON, "-m", "pytest", "-q", *TWO_AT_ONCE, "-m", "not (alone or horovod or slow)"),
        OMP_NUM_THREADS="1",
    )
    print(
        "\nLeft out: the slow tests (tests/slow_tests.txt), tests that need Horovod or both cores, "
        "the documentation build, and the check that every error is raised by a test. "
        "`python3 dev.py test` runs everything."
    )
    sys.exit(status)


def test_cuda_build(arguments: list[str]) -> None:
    """The tests that need a CUDA build of torch; they need no device."""
    need_tools()
    install("test", "horovod", torch=TORCH_CUDA)
    if not works("torch; assert torch.version.cuda"):
        sys.exit(
            f"dev.py: the torch in {ENVIRONMENT} is not a CUDA build. Remove this folder and run "
            "the command again, with a package index that has CUDA builds."
        )
    say("Horovod with NCCL (built once, some minutes; then taken from a cache)")
    architectures = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if not architectures and not works("torch; assert torch.cuda.device_count()"):
        architectures = CUDA_ARCHITECTURE
    chosen = {"HOROVOD_BUILD_CUDA_CC_LIST": architectures} if architectures else {}
    run(ENVIRONMENT / "bin" / "d9m", "install-horovod", "--gpu", "nccl", **chosen)
    say("tests marked cuda_build")
    run(PYTHON, "-m", "pytest", "-m", "cuda_build", *(arguments or ["tests"]))


def test_oldest_lightning(arguments: list[str]) -> None:
    """Tests that train and resume, with the oldest supported Lightning."""
    install("dev", "horovod", extra="examples")
    folder = ROOT / OLDEST_LIGHTNING_ENVIRONMENT
    say(f"Lightning {OLDEST_LIGHTNING} in {folder.name}; everything else from {ENVIRONMENT.name}")
    run(PYTHON, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (shared,) = ENVIRONMENT.glob("lib/python*/site-packages")
    # Not the path alone: the package itself is installed there by another such file.
    (site / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    python = folder / "bin" / "python"
    packages = [f"{name}=={OLDEST_LIGHTNING}" for name in ("lightning", "pytorch-lightning")]
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", f"--python={python}")
    run(*pip, "install", "--quiet", "--no-deps", *packages)
    # Lightning 2.2 imports pkg_resources.
    ignored = ("-W", "ignore:pkg_resources", "-W", "ignore:Deprecated call to:DeprecationWarning")
    tests = arguments or OLDEST_LIGHTNING_TESTS
    run(python, "-m", "pytest", "-p", "no:cacheprovider", *ignored, *tests)


def release(_: list[str]) -> None:
    """Build both archives of a release."""
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "hatchling>=1.27")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(PYTHON, "-m", "hatchling", "build", "-d", "dist")


def test_wheel(arguments: list[str]) -> None:
    """Train twice with the wheel in ``dist``, in a fresh environment."""
    stack = {"oldest": OLDEST_STACK, "newest": ("lightning",)}
    (chosen,) = arguments or ["newest"]
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1 or chosen not in stack:
        sys.exit("dev.py: test-wheel takes oldest or newest, and needs one wheel: dev.py release.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "environment" / "bin" / "python"
        say(f"{wheels[0].name} with the {chosen} stack")
        run(sys.executable, "-m", "venv", python.parents[1])
        run(python, "-m", "pip", "install", "--quiet", wheels[0], *stack[chosen])
        (folder / "train.py").write_text(WHEEL_TRAINING)
        command = (python, folder / "train.py")
        run(python.with_name("d9m"), "repeat", "-o", folder / "runs", "--", *command)


def use_environment(name: str) -> None:
    """Run everything in another environment than ``.venv``."""
    global ENVIRONMENT, PYTHON, UNFINISHED  # noqa: PLW0603 - one command runs in each process
    ENVIRONMENT = ROOT / name
    PYTHON = ENVIRONMENT / "bin" / "python"
    UNFINISHED = ENVIRONMENT / "unfinished"


COMMANDS = {
    "digits": digits,
    "test": test,
    "test-cuda-build": test_cuda_build,
    "test-oldest-lightning": test_oldest_lightning,
    "release": release,
    "test-wheel": test_wheel,
}


def main() -> None:
    """Read the command and run it."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"dev.py: Python {sys.version.split()[0]} is too old; use 3.10 or newer.")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "command",
        choices=list(COMMANDS),
        help="the main job, all checks, the tests of a CUDA build of torch, those of private "
        "attributes with the oldest supported Lightning, the archives of a release, or a training "
        "with its wheel",
    )
    parser.add_argument(
        "--quick", action="store_true", help="test: the checks and tests for everyday work"
    )
    options, arguments = parser.parse_known_args()
    if options.command == "test-cuda-build":
        use_environment(CUDA_ENVIRONMENT)
    make_environment()
    if options.command == "test" and options.quick:
        test_quickly()
    else:
        COMMANDS[options.command](arguments)


if __name__ == "__main__":
    main()
