"""Programs in C, C++ and JavaScript of unusual form, right and wrong."""

from __future__ import annotations

from .case import Case


def c(name: str, verdict: str, body: str, *, evasion: bool = False, message: str = "", wall_s: float = 0.0) -> Case:
    """Judge a program in C."""
    return _program("c", name, verdict, f"#include <stdio.h>\n#include <stdlib.h>\n{body}", evasion, message, wall_s)


def cpp(name: str, verdict: str, body: str, *, message: str = "") -> Case:
    """Judge a program in C++."""
    return _program("cpp", name, verdict, f"#include <iostream>\nusing namespace std;\n{body}", False, message, 0.0)


def js(name: str, verdict: str, source: str, *, evasion: bool = False, message: str = "", wall_s: float = 0.0) -> Case:
    """Judge a program in JavaScript."""
    return _program("javascript", name, verdict, source, evasion, message, wall_s)


def _program(language: str, name: str, verdict: str, source: str, evasion: bool, message: str, wall_s: float) -> Case:
    limits = {"limits": {"wall_s": wall_s}} if wall_s else {}
    manifest = {
        "kind": "stdio",
        "language": language,
        "entry": "solution",
        "tests": [{"stdin": "3 4\n", "stdout": "7\n"}],
    }
    return Case(f"{language}: {name}", verdict, source, manifest | limits, evasion=evasion, message=message)


READ = 'int a, b; scanf("%d %d", &a, &b);'
FS = "const [a, b] = require('fs').readFileSync({source}, 'utf8').split(' ').map(Number);\n"
ADD = FS.format(source="0") + "console.log(a + b);\n"

C = (
    c("printf without a newline", "AC", f'int main(void) {{ {READ} printf("%d", a + b); return 0; }}'),
    c("main without a return", "AC", f'int main() {{ {READ} printf("%d\\n", a + b); }}'),
    c("exit(0) flushes", "AC", f'int main() {{ {READ} printf("%d\\n", a + b); exit(0); }}'),
    c("atexit prints", "AC", 'int a, b; void end(void) { printf("%d\\n", a + b); }\nint main() { scanf("%d %d", &a, &b); atexit(end); return 0; }'),
    c("a large buffer", "AC", f'static char buffer[1 << 16];\nint main() {{ setvbuf(stdout, buffer, _IOFBF, sizeof buffer); {READ} printf("%d\\n", a + b); return 0; }}'),
    c("/dev/stdin", "AC", 'int main() { freopen("/dev/stdin", "r", stdin); int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); return 0; }'),
    c("80000 levels of recursion", "AC", f'int down(volatile int n) {{ return n == 0 ? 0 : 1 + down(n - 1); }}\nint main() {{ {READ} printf("%d\\n", a + b + down(80000) - 80000); return 0; }}'),
    c("a status of 1", "RE", f'int main() {{ {READ} printf("%d\\n", a + b); return 1; }}'),
    c("a null pointer", "RE", f'int main() {{ {READ} printf("%d\\n", a + b); fflush(stdout); return *(volatile int *)0; }}'),
    c("abort", "RE", f'int main() {{ {READ} printf("%d\\n", a + b); fflush(stdout); abort(); }}'),
    c("does not compile", "RE", "int main() { return }", message="error"),
    c("_exit without a flush", "WA", f'#include <unistd.h>\nint main() {{ {READ} printf("%d\\n", a + b); _exit(0); }}'),
    c("never ends", "TLE", "int main() { for (;;); }", wall_s=1.0),
    c("the answer on stderr", "WA", 'int main() { fprintf(stderr, "7\\n"); }', evasion=True),
    c("a NUL in the answer", "WA", 'int main() { fwrite("7\\0\\n", 1, 3, stdout); }', evasion=True),
    c("writes to every descriptor", "WA", '#include <unistd.h>\nint main() { for (int n = 3; n < 64; n++) write(n, "7\\n", 2); }', evasion=True),
)  # fmt: skip

CPP = (
    cpp("streams apart from stdio", "AC", "int main() { ios::sync_with_stdio(false); cin.tie(nullptr); int a, b; cin >> a >> b; cout << a + b; }"),
    cpp("a destructor of a global prints", "AC", "int a, b;\nstruct Last { ~Last() { cout << a + b << endl; } } last;\nint main() { cin >> a >> b; }"),
    cpp("an exception", "RE", "int main() { cout << 7 << endl; throw 1; }"),
)  # fmt: skip

JS = (
    js("readFileSync(0)", "AC", ADD),
    js("readFileSync('/dev/stdin')", "AC", FS.format(source="'/dev/stdin'") + "console.log(a + b);"),
    js("events of stdin", "AC", "let text = '';\nprocess.stdin.on('data', (part) => text += part).on('end', () => console.log(eval(text.trim().replace(' ', '+'))));"),
    js("readline", "AC", "require('readline').createInterface({input: process.stdin}).on('line', (line) => console.log(eval(line.replace(' ', '+'))));"),
    js("await", "AC", "(async () => { let text = ''; for await (const part of process.stdin) text += part; console.log(eval(text.trim().replace(' ', '+'))); })();"),
    js("write without a newline", "AC", ADD.replace("console.log(a + b)", "process.stdout.write(String(a + b))")),
    js("process.exit after the answer", "AC", ADD + "process.exit();"),
    js("prints at the end", "AC", ADD.replace("console.log(a + b)", "process.on('exit', () => console.log(a + b))")),
    js("a status of 2", "RE", ADD + "process.exitCode = 2;"),
    js("throws", "RE", ADD + "throw new Error('no');"),
    js("a promise is rejected", "RE", ADD + "Promise.reject(new Error('no'));"),
    js("syntax", "RE", "console.log("),
    js("never ends", "TLE", ADD + "setInterval(() => {}, 1000);", wall_s=1.0),
    js("a lying object", "WA", "console.log({toString: () => '7', valueOf: () => 7});", evasion=True),
)  # fmt: skip

LANGUAGES = (*C, *CPP, *JS)
