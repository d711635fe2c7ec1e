"""A Python session inside a sandbox: cells come as JSON lines on stdin, what they do goes out as JSON lines.

Runs in the sandbox with nothing of ours and nothing beyond Python's own library (3.8 or newer). It is the agent's as much as what runs in
it: whoever reads its lines must not trust them. Line: {"id", "type", ...}; `end` is the last of a cell.
"""

import ast
import asyncio
import base64
import builtins
import codecs
import fcntl
import inspect
import io
import json
import linecache
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
import types

FORMATS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf", "text/latex": "latex", "application/json": "json", "application/javascript": "javascript",
}
METHODS = {
    "text/html": "_repr_html_", "text/markdown": "_repr_markdown_", "image/svg+xml": "_repr_svg_", "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_", "application/pdf": "_repr_pdf_", "text/latex": "_repr_latex_", "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
PIECE = 32768
INLINE = "_dsec_inline"  # matplotlib's way to us


class Out:
    """Where lines go. Descriptors 1 and 2 become pipes of ours, so that what children write keeps its place among the results."""

    def __init__(self):
        self.file = os.fdopen(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 64), "wb", 0)
        self.lock = threading.RLock()
        self.cell = None
        self.pipes = []
        for number, name in ((1, "stdout"), (2, "stderr")):
            read, write = os.pipe()
            os.dup2(write, number)
            os.close(write)
            pipe = {"fd": read, "name": name, "busy": threading.Lock()}
            self.pipes.append(pipe)
            threading.Thread(target=self.pump, args=(pipe,), daemon=True).start()

    def send(self, kind, **fields):
        line = json.dumps({"id": self.cell, "type": kind, **fields}).encode() + b"\n"
        with self.lock:
            while line:
                line = line[self.file.write(line):]

    def pump(self, pipe):
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        poll = select.poll()
        poll.register(pipe["fd"], select.POLLIN)
        while True:
            poll.poll()
            with pipe["busy"]:
                text = decode(os.read(pipe["fd"], PIECE))
                if text:
                    self.send(pipe["name"], text=text, timestamp=time.time_ns())

    def flush(self):
        """What was written so far is out."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        for pipe in self.pipes:
            while True:
                with pipe["busy"]:
                    left = struct.unpack("i", fcntl.ioctl(pipe["fd"], termios.FIONREAD, b"\0\0\0\0"))[0]
                if not left:
                    break
                time.sleep(0.0005)


class Kernel:
    def __init__(self, out):
        self.out = out
        self.count = 0
        self.kept = sys.modules["__main__"]
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")
        self.names = self.module.__dict__
        self.names.update(__builtins__=builtins, In=[], Out={}, get_ipython=lambda: None)
        builtins.display = self.display
        inline = types.ModuleType(INLINE)
        inline.__getattr__ = self.backend
        inline.show = lambda *a, **k: self.figures()
        sys.modules[INLINE] = inline
        os.environ.setdefault("MPLBACKEND", "module://" + INLINE)

    # results
    def backend(self, name):
        if name != "FigureCanvas":
            raise AttributeError(name)
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        sys.modules[INLINE].FigureCanvas = FigureCanvasAgg  # matplotlib looks into the module itself, too
        return FigureCanvasAgg

    def bundle(self, value):
        data = {}
        whole = getattr(type(value), "_repr_mimebundle_", None)
        if whole is not None:
            found = whole(value)
            data.update(found[0] if isinstance(found, tuple) else found or {})
        for mime, name in METHODS.items():
            method = getattr(type(value), name, None)
            if method is not None and mime not in data:
                try:
                    found = method(value)
                except Exception:
                    continue
                found = found[0] if isinstance(found, tuple) else found
                if found is not None:
                    data[mime] = found
        if "text/plain" not in data:
            data["text/plain"] = repr(value)
        if type(value).__module__ == "matplotlib.figure" and "image/png" not in data:
            data["image/png"] = self.png(value)
        return data

    def png(self, figure):
        file = io.BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()

    def result(self, data, main):
        shown = {}
        for mime, value in data.items():
            if mime not in FORMATS:
                continue
            if isinstance(value, bytes):
                binary = mime in ("image/png", "image/jpeg", "application/pdf")
                value = base64.b64encode(value).decode() if binary else value.decode("utf-8", "replace")
            shown[FORMATS[mime]] = value
        self.out.flush()
        self.out.send("result", is_main_result=main, **shown)

    def display(self, *values, **ignored):
        for value in values:
            self.result(self.bundle(value), False)

    def figures(self):
        pyplot = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot is not None else ():
            figure = pyplot.figure(number)
            self.result({"text/plain": repr(figure), "image/png": self.png(figure)}, False)
            pyplot.close(figure)

    # cells
    def run(self, code):
        self.count += 1
        self.out.send("number_of_executions", execution_count=self.count)
        name = f"<cell {self.count}>"
        text = self.magics(code)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        self.names["In"].append(code)
        tree = ast.parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if last is not None and text.rstrip().endswith(";"):
            tree.body.append(last)
            last = None
        if tree.body:
            self.evaluate(compile(tree, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if last is not None:
            value = self.evaluate(compile(ast.Expression(last.value), name, "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
            if value is not None:
                self.names["_"] = self.names["Out"][self.count] = value
                self.result(self.bundle(value), True)
        self.figures()

    def evaluate(self, code):
        value = eval(code, self.names)
        if code.co_flags & inspect.CO_COROUTINE:
            return self.loop().run_until_complete(value)
        return value

    def loop(self):
        if not hasattr(self, "_loop"):
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    # magics
    def magics(self, code):
        first, _, rest = code.lstrip("\n").partition("\n")
        if first.startswith("%%"):
            name = first[2:].strip()
            if name in ("bash", "sh"):
                return f"_dsec_shell({rest!r}, {name!r})"
            raise UsageError(f"cell magic {name!r} is not there: there are %%bash and %%sh")
        lines = code.split("\n")
        try:
            ast.parse(code)
            return code
        except SyntaxError:
            pass
        return "\n".join(self.line(line) for line in lines)

    def line(self, line):
        found = re.match(r"^(\s*)([!%])(.*)$", line)
        if not found:
            return line
        return f"{found[1]}_dsec_{'shell' if found[2] == '!' else 'magic'}({found[3]!r})"

    def shell(self, text, program="bash"):
        self.out.flush()
        status = subprocess.call([program, "-c", text], stdin=subprocess.DEVNULL)
        self.names["_exit_code"] = status

    def magic(self, text):
        name, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if name == "cd":
            os.chdir(os.path.expanduser(rest or "~"))
        elif name == "pwd":
            print(os.getcwd())
        elif name == "pip":
            self.shell(shlex.quote(sys.executable) + " -m pip " + rest)
        elif name == "env":
            key, equals, value = rest.partition("=")
            if equals:
                os.environ[key.strip()] = value.strip()
            else:
                print(dict(os.environ) if not key else os.environ[key])
        elif name not in ("matplotlib", "autoreload", "load_ext"):  # these change nothing here
            raise UsageError(f"magic %{name} is not there: there are cd, pwd, env and pip")


class UsageError(Exception):
    pass


def main():
    asked = os.fdopen(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 64), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    out = Out()
    sys.stdin = open(0)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = [""]
    kernel = Kernel(out)
    kernel.names.update(_dsec_shell=kernel.shell, _dsec_magic=kernel.magic)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out.send("ready", cwd=os.getcwd())
    while True:
        line = asked.readline()
        if not line:
            return
        cell = json.loads(line)
        out.cell = cell["id"]
        before = {name: os.environ.get(name) for name in cell.get("env_vars") or {}}
        os.environ.update(cell.get("env_vars") or {})
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                kernel.run(cell["code"])
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as error:
            out.flush()
            out.send("error", name=type(error).__name__, value=str(error), traceback=shown(error))
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        out.flush()
        out.send("end")


def shown(error):
    """Without the frames of this program."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


main()
