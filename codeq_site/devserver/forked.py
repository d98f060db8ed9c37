"""Run Python modules in forks of this process, which has imported what they need.

Forks share the memory of the imported modules until one of them writes to it, so a further process takes 10 to 20 MiB
instead of 80, and starts at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from subprocess import TimeoutExpired

from codeq_site.devserver.supervisor import STOP_SIGNALS, die_with, set_process_name

# Modules that the services import besides the apps, most of them lazily.
SHARED_MODULES = (
    "billiard.popen_fork",
    "billiard.sharedctypes",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.log",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.contrib.django.task",
    "celery.events.receiver",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "codeq_site.asgi",
    "core.http.protocol",
    "django.contrib.sessions.backends.db",
    "kombu.transport.redis",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
)
_POLL_SECONDS = 0.02


def import_application() -> None:
    """Import what web processes and Celery use, and check the settings.

    Raises ConfigError, or SystemCheckError, whose message lists the problems.
    """
    import django

    django.setup()
    from django.core.management import call_command
    from django.utils.module_loading import autodiscover_modules

    # The checks also import the URLs with their views. Celery's processes would repeat them, and write to the memory
    # that they share.
    call_command("check", stdout=StringIO())
    os.environ["CELERY_SKIP_CHECKS"] = "true"
    for name in SHARED_MODULES:
        import_module(name)
    autodiscover_modules("periodic_tasks")
    # Garbage collection would write to every imported object, and so copy its memory.
    gc.collect()
    gc.freeze()


class ForkedProcess:
    """A forked child, with the methods of `subprocess.Popen` that the supervisor calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise TimeoutExpired(f"the process {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass(frozen=True)
class ForkedModule:
    """A program that `python -m` starts, which runs in a fork of this process instead.

    `release` closes the files of this process that the fork must not keep open.
    """

    name: str
    argv: Sequence[str]
    log: Path | None
    release: Callable[[], None]
    stop_signal: int = signal.SIGTERM

    def launch(self) -> ForkedProcess:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # Until the child has its own handlers, a signal must not run those of the supervisor in it.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            code = None
            try:
                die_with(parent, self.stop_signal)
                self._reset()
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
                code = self._run()
            finally:
                # The child must never return into the code of the supervisor.
                if code is None:
                    traceback.print_exc()
                _end(1 if code is None else code)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        return ForkedProcess(pid)

    def _reset(self) -> None:
        """Drop the session, signal handlers, files and exit handlers of the supervisor."""
        os.setsid()
        set_process_name(self.name)
        self.release()
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        sink = 2 if self.log is None else os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        if sink > 2:
            os.close(sink)

    def _run(self) -> int:
        module, *arguments = self.argv
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return 0


def _end(code: int) -> None:
    """End this process as the interpreter does, without the frames of the supervisor."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
