"""Files and addresses that are not trusted: SECURITY.md says what holds, and names these tests."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import ast
import json
import pickle
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import eventful
import videos
import zoo_timm
from clips import moving_square
from commands import here  # noqa: F401
from eventful import Config
from eventful.cli.bench_video import load_head
from eventful.errors import (
    CheckpointError,
    ConfigError,
    DamagedMediaError,
    EventfulError,
    SnapshotError,
)
from eventful.memory import snapshot as snapshots
from eventful.models import loading, shipped
from eventful.paper.train import checkpoints
from eventful.video.protocols import is_playlist
from eventful.video.source import VideoFile
from test_read_security import LISTS, SECRETS

ROOT = Path(__file__).resolve().parent.parent
CODE = [
    path
    for part in ("src", "benchmarks", "scripts")
    for path in sorted((ROOT / part).rglob("*.py"))
]
RAN: list[str] = []


# What the code calls.

# Ways to run what a file or a text holds, by the name that is called.
FORBIDDEN = {
    *(
        "eval",
        "exec",
        "compile",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "marshal.loads",
    ),
    *("marshal.load", "shelve.open", "joblib.load", "dill.load", "cloudpickle.load", "yaml.load"),
    *("torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "os.system", "os.popen"),
}
AV_OPEN = ("av.open", "load('av').open", "libraries.load('av').open")
RESTRICTED = "models/checkpoints.py"  # has the one unpickler, which allows a list of names


def unsafe(path: Path, text: str) -> Iterator[str]:
    """Calls in a file that would run what they read."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if "pickle.Unpickler" in bases and not str(path).endswith(RESTRICTED):
                yield f"{path}:{node.lineno} {node.name}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        writes = [ast.unparse(argument) for argument in node.args[1:2]] == ["'w'"]
        if (
            name in FORBIDDEN
            or (name == "torch.load" and words.get("weights_only") != "True")
            or (name in {"np.load", "numpy.load"} and words.get("allow_pickle", "False") != "False")
            or (name.startswith("subprocess.") and words.get("shell", "False") != "False")
            or (name in AV_OPEN and not writes and "open_options(" not in words.get("options", ""))
        ):
            yield f"{path}:{node.lineno} {name}"


def test_no_code_of_a_file_is_run_anywhere():
    assert len(CODE) > 200
    # Benchmarks read the clips that their user names; they are not part of the package.
    known = {"benchmarks/default.py", "benchmarks/codec/__main__.py", "benchmarks/codec/blocks.py"}
    found = [
        line
        for path in CODE
        if str(path.relative_to(ROOT)) not in known
        for line in unsafe(path.relative_to(ROOT), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(data)",
        "class A(pickle.Unpickler): ...",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "av.open(path)",
        "av.open(path, options={})",
        "load('av').open(path)",
    ],
)
def test_that_rule_can_fail(text):
    assert list(unsafe(Path("a.py"), text))
    assert not list(unsafe(Path("a.py"), "torch.load(path, weights_only=True)"))


class Trap:
    """Calls a function where it is unpickled."""

    def __reduce__(self):
        return _run, ()


def _run() -> None:
    RAN.append("ran")


def test_the_trap_works():
    RAN.clear()
    pickle.loads(pickle.dumps(Trap()))
    assert RAN == ["ran"]


def test_checkpoints_of_training_run_nothing(tmp_path):
    RAN.clear()
    path = tmp_path / "step_00000001.pt"
    torch.save({"model": {}, "position": Trap()}, path)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        checkpoints.load(path)
    assert RAN == []


def test_heads_run_nothing(tmp_path):
    RAN.clear()
    backbone = type("Named", (), {"name": "vit", "model": zoo_timm.ZOO["vit"].make()})()
    for content in ({"head": Trap()}, [1], {}):
        torch.save(content, tmp_path / "head.pt")
        with pytest.raises(CheckpointError, match="holds no head"):
            load_head(tmp_path / "head.pt", backbone, "cpu")
    (tmp_path / "head.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(CheckpointError, match="holds no head"):
        load_head(tmp_path / "head.pt", backbone, "cpu")
    assert RAN == []


# Weights.

HUGE = (2**62).to_bytes(8, "little") + b'{"__metadata__":{}}'
OUTSIDE = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99999999]}}'
LYING = len(OUTSIDE).to_bytes(8, "little") + OUTSIDE + b"\0" * 16
BOMB = b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}'
BOMB = len(BOMB).to_bytes(8, "little") + BOMB + b"\0" * 16


@pytest.mark.parametrize("content", [HUGE, LYING, BOMB], ids=["header", "offsets", "shape"])
def test_sizes_in_a_header_are_checked(content, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        loading.read_checkpoint(path)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        loading.load_model(path)
    with pytest.raises(SnapshotError):
        eventful.Stream.load(converted(), content)


def described(tmp_path: Path, **changes: object) -> Path:
    """The detector's description, changed, over a few small tensors."""
    about = loading._about(shipped.weights_of("detector"))
    about = json.loads(json.dumps(about))
    for name, value in changes.items():
        place = about["config"]["backbone"] if name in about["config"]["backbone"] else about
        place[name] = value
    path = tmp_path / "a.safetensors"
    text = changes.get("text") or json.dumps(about)
    path.write_bytes(save({f"a{n}": torch.zeros(2) for n in range(9)}, metadata={"eventful": text}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 10**9}, "depth = 1000000000"),
        ({"dim": 10**9}, "dim = 1000000000"),
        ({"size": 1e300}, "size = 1e"),
        ({"dim": 60000, "depth": 1}, "do not fit the model"),
        ({"depth": 1}, "do not fit the model"),
        ({"model": "os.system"}, "from another version"),
        ({"config": []}, "is damaged"),
        ({"text": "["}, "is damaged"),
        ({"text": "[" * 100_000}, "is damaged"),
        ({"text": "[1]"}, "is damaged"),
    ],
)
def test_a_description_cannot_ask_for_a_huge_model(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        loading.load_model(described(tmp_path, **changes))


# Snapshots.


def converted() -> torch.nn.Module:
    return eventful.convert(zoo_timm.ZOO["vit"].make(), Config.fast())


@pytest.fixture(scope="module")
def taken():
    """A model, and the description and tensors of a snapshot of it."""
    model = converted()
    stream = eventful.Stream(model)
    for frame in moving_square(3, zoo_timm.ZOO["vit"].size):
        stream(frame)
    header, tensors = snapshots._read_file(stream.snapshot())
    return model, json.loads(header["eventful"]), tensors


def forged(description: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """A snapshot with a right checksum."""
    header = {"eventful": description, "checksum": snapshots._checksum(description, tensors)}
    return save(tensors, metadata=header)


def test_what_is_not_changed_loads(taken):
    model, about, tensors = taken
    assert eventful.Stream.load(model, forged(json.dumps(about), tensors)).nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"frames": "[[[["},
        {"frames": [True]},
        {"frames": [-2]},
        {"frames": [1, 2]},
        {"signature": [["a"], "float32", "cpu", ""]},
        {"signature": [[1], "load", "cpu", ""]},
        {"signature": []},
        {"policies": [{"policy": "os.system"}]},
    ],
    ids=str,
)
def test_forged_snapshots_are_refused(taken, change):
    model, about, tensors = taken
    with pytest.raises((SnapshotError, ConfigError)):
        eventful.Stream.load(model, forged(json.dumps({**about, **change}), tensors))


def test_a_snapshot_nested_too_deep_is_refused(taken):
    model, _, tensors = taken
    with pytest.raises(SnapshotError, match="Not a snapshot"):
        eventful.Stream.load(model, forged("[" * 100_000, tensors))


# Videos.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("av")
    made = tmp_path_factory.mktemp("videos")
    videos.pan(made / "target.ts", 4)
    return made


@pytest.mark.parametrize("kind", LISTS)
def test_playlists_in_datasets_are_not_followed(folder, kind):
    for suffix in (".mp4", f".{kind.split()[0]}"):
        path = folder / f"list{suffix}"
        path.write_text(LISTS[kind].format(address="http://127.0.0.1:9"))
        with pytest.raises(DamagedMediaError, match="is a playlist"):
            len(VideoFile(path))
    assert len(VideoFile(folder / "target.ts")) == 4


@pytest.mark.parametrize(
    "text",
    [
        "<!-- a comment --><MPD>",
        "a line\nc=IN IP4 127.0.0.1\n",
        "<a/><CompositionPlaylist>",
        "\ufeff#EXTM3U",
        "  \n ffconcat version 1.0",
    ],
)
def test_playlists_are_recognised_without_ffmpeg(tmp_path, text):
    """OpenCV has no limits on formats, so files are looked at first."""
    path = tmp_path / "a.mp4"
    path.write_text(text)
    assert is_playlist(path)


def test_a_video_is_no_playlist(folder):
    assert not is_playlist(folder / "target.ts")


def test_a_redirect_opens_no_file(folder):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", f"file://{folder / 'target.ts'}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(EventfulError, match="cannot be read"):
        eventful.read(f"http://127.0.0.1:{server.server_port}/a.ts", timeout=60)
    server.shutdown()
    server.server_close()


# Credentials.


@pytest.mark.parametrize("command", [["bench", "video"], ["calibrate", "vit_tiny_patch16_224"]])
def test_commands_show_no_credentials(command, here, tmp_path):
    address = "rtsp://admin:hunter2@127.0.0.1:9/a?token=s3cret"
    done = here(*command, address, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "127.0.0.1" in done.stderr
    assert not [secret for secret in SECRETS if secret in done.stdout + done.stderr]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_code_of_a_repository_is_not_run(tmp_path, here, monkeypatch):
    """A folder as the hub has them, with a config class of its own."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    mark = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: ...")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    done = here("inspect", f"hf:{tmp_path}")
    assert done.returncode == 2, done.stderr
    assert not mark.exists()


# The page.

PAGE = (ROOT / "SECURITY.md").read_text()


def test_tests_that_the_page_names_exist():
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 10
    for file, test in named:
        text = (ROOT / file).read_text()
        assert not test or re.search(rf"def {test}\b", text), f"{file}::{test}"


def test_each_row_of_the_page_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    claims = [row for row in rows if not row.startswith("| what |")]
    assert len(claims) > 8
    assert [row for row in claims if "`tests/" not in row] == []
