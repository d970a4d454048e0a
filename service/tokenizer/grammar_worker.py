"""The grammar process: turns what clients want their outputs to be into grammars, one at a time.

Each in a child process of its own, forked for it, with ceilings of the kernel's: llguidance takes
minutes and gigabytes for some schemas of a few hundred bytes, and overflows its stack on others
(docs/decisions/0069). Started as `python -m service.tokenizer.grammar_worker`; loads no model.
"""

import os
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from service.tokenizer import worker_loop
from service.tokenizer.grammars import GrammarMaker, GrammarRefusedError
from service.tokenizer.jobs import Compiled, CompileGrammar, Ready, Refused, Reply, TooCostly

# An engine that does the same in a thread has a stack of twice that at least.
MAX_STACK_BYTES = 1 << 20
MAX_ADDRESS_SPACE_BYTES = 256 << 20
_TOO_LARGE = TooCostly(
    "compiling it takes more memory than it may have; make it smaller or less deeply nested"
)


@dataclass(frozen=True, slots=True)
class GrammarRunner:
    """max_cpu_s: of a processor, for one grammar."""

    maker: GrammarMaker
    max_cpu_s: float

    def run(self, job: CompileGrammar) -> Reply:
        """What one job comes to, whatever that does to its child."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            self._answer(job, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            payload = pipe.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return self._killed_by(os.WTERMSIG(status))
        if status:
            return Refused("it cannot be compiled")
        return msgspec.msgpack.decode(payload, type=Compiled | Refused | TooCostly)

    def _answer(self, job: CompileGrammar, writer: int) -> NoReturn:
        """In the child, which goes no further."""
        status = 1
        try:
            self._leave_behind(writer)
            self._limit()
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(self._compile(job)))
            status = 0
        except BaseException:  # noqa: BLE001 - llguidance's panics are BaseExceptions
            traceback.print_exc()
        finally:
            os._exit(status)

    def _compile(self, job: CompileGrammar) -> Reply:
        try:
            return Compiled(self.maker.make(job.constraint))
        except GrammarRefusedError as error:
            return Refused(str(error))
        except MemoryError:
            return _TOO_LARGE

    def _leave_behind(self, writer: int) -> None:
        """Whoever waits for the end of the worker's pipes must not wait for its child."""
        os.close(sys.stdin.fileno())
        os.closerange(sys.stderr.fileno() + 1, writer)
        os.closerange(writer + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def _limit(self) -> None:
        """The kernel ends who goes beyond, native code included."""
        for kind, ceiling in (
            (resource.RLIMIT_AS, MAX_ADDRESS_SPACE_BYTES),
            (resource.RLIMIT_STACK, MAX_STACK_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (ceiling, resource.getrlimit(kind)[1]))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, self.max_cpu_s)

    def _killed_by(self, number: int) -> TooCostly:
        if number != signal.SIGPROF:
            return _TOO_LARGE
        return TooCostly(f"compiling it takes more than {self.max_cpu_s:g} s; make it simpler")


def main(arguments: list[str]) -> None:
    """arguments: seconds of a processor that one grammar may take."""
    replies = worker_loop.open_replies()
    runner = GrammarRunner(GrammarMaker(), float(arguments[0]))
    worker_loop.send(replies, Ready())
    decoder = msgspec.msgpack.Decoder(CompileGrammar)
    worker_loop.serve(decoder, runner.run, sys.stdin.buffer, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
