"""`kbrl completion`: what makes a shell complete commands, options, runs and settings on Tab; argcomplete's work."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from kbrl_async.errors import MissingTool

SHELLS = ("bash", "zsh", "fish")
_ZSH = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
"""argcomplete's code calls `compdef`, which a zsh without a start file of its own has not loaded yet."""
EPILOG = """\
to have it in every shell, put into its start file:
  ~/.bashrc                    eval "$(kbrl completion bash)"
  ~/.zshrc                     eval "$(kbrl completion zsh)"
  ~/.config/fish/config.fish   kbrl completion fish | source
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    try:
        argcomplete: Any = importlib.import_module("argcomplete")
    except ImportError:
        raise MissingTool("completion needs the package argcomplete", "Install it: pip install argcomplete") from None
    if args.shell == "zsh":
        print(_ZSH)
    print(argcomplete.shellcode(["kbrl"], shell=args.shell))
    return 0
