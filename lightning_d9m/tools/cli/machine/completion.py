"""``d9m completion``: print the script with which a shell completes commands and options."""

import argparse

from lightning_d9m.errors import SettingError

ARGUMENTS = """
shell:{bash,fish,tcsh,zsh}  the shell; for bash, add to ~/.bashrc: eval "$(d9m completion bash)"
    (for fish: d9m completion fish > ~/.config/fish/completions/d9m.fish)
"""
EXAMPLE = 'eval "$(d9m completion bash)"'


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    # Here, because that module imports the one of the chosen command.
    from lightning_d9m.tools.cli.main import COMMANDS, build_parser

    try:
        import shtab
    except ImportError as error:
        raise SettingError(
            "Completion needs the package shtab, which is not installed. Run: pip install shtab"
        ) from error
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise SettingError(
            f"The installed shtab {shtab.__version__} does not know {arguments.shell}. Run: pip "
            "install --upgrade shtab"
        )
    print(shtab.complete(build_parser(*COMMANDS), arguments.shell))
    return 0
