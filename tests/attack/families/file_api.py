"""Attacks on the file API: links, pipes, races, names and forged replies. Files are handled inside the jail."""

from __future__ import annotations

from collections.abc import Sequence

from ..arena import Scene
from ..attack import Attack, Family, Verdict

HARMLESS, REFUSED = Verdict.HARMLESS, Verdict.REFUSED
_REFUSED = "refused: .*"
_BROKEN = "(refused|ended): .*"


def _get(name: str, prepare: str, paths: Sequence[str], held: Sequence[str], *, quick: bool = False) -> Attack:
    async def drive(scene: Scene) -> None:
        await scene.run(prepare)
        for path in paths:
            scene.say(await scene.get(scene.named(path)))

    return Attack(name=name, verdict=HARMLESS, source=prepare, drive=drive, held=held, quick=quick)


def _put(name: str, prepare: str, paths: Sequence[str], held: Sequence[str], *, quick: bool = False) -> Attack:
    async def drive(scene: Scene) -> None:
        await scene.run(prepare)
        for path in paths:
            scene.say(await scene.put(scene.named(path)))

    return Attack(name=name, verdict=HARMLESS, source=prepare, drive=drive, held=held, quick=quick)


async def _race(scene: Scene) -> None:
    """A child swaps a name between a file, a link to the host, a pipe and a device while it is read and written."""
    await scene.run(
        """
        import stat
        write('plain', b'plain')
        os.symlink(CANARY, 'host')
        os.symlink('/dev/zero', 'zero')
        if os.fork() == 0:
            while True:
                for name in ('plain', 'host', 'zero'):
                    os.link(name, 'next', follow_symlinks=False)
                    os.replace('next', 'f')
        """
    )
    said = [await scene.get("f", 100) for _ in range(40)]
    said += [await scene.put("f") for _ in range(10)]
    scene.say(
        "only plain"
        if all(word == "put" or word.startswith(("got b'p", "got b''", "refused")) for word in said)
        else str(said)
    )


async def _pipe_written(scene: Scene) -> None:
    await scene.run("os.mkfifo('pipe')")
    scene.say(await scene.put("pipe"))


async def _forged_names(scene: Scene) -> None:
    """A reply to `get` with names that were not requested."""
    await scene.run(
        """
        import base64, json, threading
        import rollmesh.sandbox_runtime.files as files
        files.get = lambda paths, bytes_max: {'../../../../tmp/stray-' + TOKEN: base64.b64encode(b'x').decode()}
        """
    )
    scene.say(await scene.get("asked"))


async def _forged_size(scene: Scene) -> None:
    """A reply to `get` with more bytes than allowed."""
    await scene.run(
        """
        import base64
        import rollmesh.sandbox_runtime.files as files
        files.get = lambda paths, bytes_max: {'asked': base64.b64encode(bytes(1 << 20)).decode()}
        """
    )
    scene.say(await scene.get("asked", 1000))


async def _forged_base64(scene: Scene) -> None:
    await scene.run(
        "import rollmesh.sandbox_runtime.files as files\nfiles.get = lambda paths, bytes_max: {'asked': '\\u00ff*'}"
    )
    scene.say(await scene.get("asked"))


def _driven(name: str, drive: object, held: Sequence[str], **fields: object) -> Attack:
    return Attack(name=name, verdict=HARMLESS, source="", drive=drive, held=held, **fields)  # type: ignore[arg-type]


ATTACKS = (
    _get("read through links to the host", "os.symlink(CANARY, 'link')\nos.symlink('/', 'root')\nos.symlink('/etc/shadow', 's')",
         ["link", "root{CANARY}", "s"], [_REFUSED] * 3, quick=True),
    _get("read by absolute and climbing paths", "print()", ["{CANARY}", "../../../..{CANARY}", "/proc/self/environ", "./../etc/shadow"],
         [_REFUSED] * 4, quick=True),
    _get("read what never ends", "os.mkfifo('pipe')\nos.symlink('/dev/zero', 'zero')\nos.mkdir('d')\nos.symlink('loop', 'loop')",
         ["pipe", "zero", "d", "loop"], [_REFUSED] * 4, quick=True),
    _get("read more than allowed", "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwrite('big', bytes(2 << 20))", ["big"], [_REFUSED]),
    _get("read names that are not text", "write(b'\\xff\\xfe', b'x')\nwrite('a\\nb', b'x')", ["a\nb", "a\0b"],
         ["got b'x'", _REFUSED]),
    _put("write through links to the host", "os.symlink(CANARY, 'link')\nos.symlink('/', 'root')\nos.symlink('/usr/lib', 'lib')",
         ["link", "root{CANARY}", "lib/stray"], [_REFUSED] * 3, quick=True),
    _put("write by absolute and climbing paths", "print()", ["{CANARY}", "../stray", "/etc/stray", "/usr/lib/stray", "{FOLDER}/stray"],
         [_REFUSED] * 5, quick=True),
    _put("write over directories and without room", "os.mkdir('d')\nos.chmod('/session', 0o500)", ["d", ".", "new/file"], [_REFUSED] * 3),
    _driven("write to a pipe without a reader", _pipe_written, [_REFUSED], quick=True),
    _driven("swap files, links and devices while they are read and written", _race, ["only plain"], quick=True),
    _driven("a reply that names files that were not requested", _forged_names, [_BROKEN], quick=True),
    _driven("a reply with more bytes than requested", _forged_size, [_BROKEN]),
    _driven("a reply that is not base64", _forged_base64, [_BROKEN]),
)  # fmt: skip

FAMILY = Family(name="file API", attacks=ATTACKS)
