"""Commands as people type them, against one queue."""

import json
import os
import re
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from gllm.keys import Keys
from worker.cli import main


class Commands:
    """Runs `gllm …` in this process, with nothing of this machine's settings but the queue."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.keys = keys
        unset = {name: None for name in os.environ if name.startswith("GLLM_")}
        self.environment = {**unset, "GLLM_REDIS_URL": url, "GLLM_QUEUE": keys.queue}

    def __call__(self, *arguments: str, **more: Any) -> Result:
        result = CliRunner().invoke(main, list(arguments), env=self.environment, **more)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def text(self, *arguments: str) -> str:
        """What a command that ends well prints; its times and entry ids, which differ each time, as T and E."""
        result = self(*arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return stable(result.stdout)

    def json(self, *arguments: str, status: int = 0) -> Any:
        """What a command says to programs: one line of JSON."""
        result = self(*arguments, "--json")
        assert result.exit_code == status, result.output
        (line,) = result.stdout.splitlines()
        return json.loads(line)

    def process(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        """The command as a process of its own."""
        given = {name: value for name, value in self.environment.items() if value is not None}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLLM_", "NO_COLOR", "TERM"))}
        environment = {**kept, "TERM": "xterm", **given, **more.pop("environment", {})}
        return subprocess.Popen([sys.executable, "-m", "worker.cli", *arguments], env=environment, **more)


def stable(text: str) -> str:
    """Text without what differs each time; runs of spaces become one."""
    text = re.sub(r"\b1\d{12}-\d+", "E", text)
    text = re.sub(r"\b(\d+d)?(\d+h)?(\d+m)?(\d+(\.\d+)?m?s)\b|\b\d+[dhm](\d+[hm])?\b", "T", text)
    return re.sub(r"  +", "  ", text)
