"""``python -m kvstore_plugin.timeline``: its page, the joined trace of all ranks, and its errors about wrong files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.recordings import awake, dropped, operation, recording
from kvstore_plugin.timeline.__main__ import main

_LATE = 0.3  # seconds

# Rank 2, which is alone on the second host, comes late to the second step.
_SCRIPT = f"""
    import sys, time
    import kvstore_plugin as mykv
    import mxnet as mx
    import numpy as np
    mykv.init()
    make = mx.np.array if mx.__version__.startswith("2.") else mx.nd.array
    net = mx.gluon.nn.Dense(300, in_units=400)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {{"learning_rate": 0.1}})
    mykv.start_timeline(sys.argv[1])
    for step in range(3):
        if step == 1 and mykv.rank() == 2:
            time.sleep({_LATE})
        with mx.autograd.record():
            loss = net(make(np.ones((2, 400), "float32"))).sum()
        loss.backward()
        trainer.step(2)
        mx.nd.waitall()
    mykv.barrier()
    mykv.stop_timeline()
"""


class TraceReader:
    """Reads a trace by the rules of the trace event format, and fails where a rule is broken."""

    def __init__(self, path) -> None:
        content = json.loads(path.read_text())
        assert content["displayTimeUnit"] == "ms" and isinstance(content["otherData"], dict)
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.slices: dict[tuple[int, int], list[tuple[int, int, dict]]] = {}
        self.flows: dict[int, list[dict]] = {}
        for event in content["traceEvents"]:
            getattr(self, f"_{event['ph']}")(event)
        assert set(self.slices) <= set(self.threads) and {pid for pid, _ in self.threads} <= set(self.processes)
        for thread in self.slices.values():
            self._check_nesting(thread)
        for pair in self.flows.values():
            self._check_flow(pair)

    def _M(self, event) -> None:
        names = {"process_name": "name", "thread_name": "name"}
        names.update(process_sort_index="sort_index", thread_sort_index="sort_index")
        value = event["args"][names[event["name"]]]
        if event["name"] == "process_name":
            assert event["pid"] not in self.processes, "a process has two names"
            self.processes[event["pid"]] = value
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in self.threads, "a thread has two names"
            self.threads[event["pid"], event["tid"]] = value

    def _X(self, event) -> None:
        begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert begin >= 0 and length >= 0 and isinstance(event["name"], str)
        self.slices.setdefault((event["pid"], event["tid"]), []).append((begin, begin + length, event))

    def _i(self, event) -> None:
        assert event["s"] == "p" and event["ts"] >= 0

    def _s(self, event) -> None:
        assert event["id"] not in self.flows, "two flows have one id"
        self.flows[event["id"]] = [event]

    def _f(self, event) -> None:
        assert event["bp"] == "e"
        self.flows[event["id"]].append(event)

    def _check_nesting(self, slices) -> None:
        around: list[int] = []
        for begin, end, event in sorted(slices, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], event
            around.append(end)

    def _check_flow(self, pair) -> None:
        """Both ends lie in a slice, and the arrow does not go back in time."""
        start, finish = pair
        assert start["name"] == finish["name"] and start["cat"] == finish["cat"] and start["ts"] <= finish["ts"]
        assert start["pid"] != finish["pid"]
        for event in pair:
            time = round(event["ts"] * 1000)
            assert any(begin <= time <= end for begin, end, _ in self.slices[event["pid"], event["tid"]])

    def calls(self, pid) -> list[dict]:
        """The slices of operations of a process."""
        found = [event for (of, _), thread in self.slices.items() if of == pid for _, _, event in thread]
        return [event for event in found if "signature" in event.get("args", {})]


def _run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvstore_plugin.timeline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    part = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", part.partition("<tbody>")[2])
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_files_of_all_ranks_become_one_trace_and_one_page(mpirun, tmp_path):
    result = mpirun(3, _SCRIPT, str(tmp_path / "t-{rank}.mykv"), env={"MYKV_VIRTUAL_HOSTS": "2"})
    assert result.code == 0, result.text
    files = [tmp_path / f"t-{rank}.mykv" for rank in range(3)]
    page, trace = tmp_path / "page.html", tmp_path / "joined.json"
    done = _run(*files[::-1], "-o", page, "--trace", trace)
    assert done.returncode == 0 and done.stdout.split() == [str(trace), str(page)], done.stderr

    reader = TraceReader(trace)
    assert [reader.processes[rank].split(" on ")[0] for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]
    buckets = [[call for call in reader.calls(rank) if "batch size" in call["name"]] for rank in range(3)]
    assert [len(of_rank) for of_rank in buckets] == [len(buckets[0])] * 3 and len(buckets[0]) >= 3
    # One clock: the late step ends on no rank before rank 2 has come to it.
    came = max(call["ts"] for call in buckets[2] if call["args"]["turn"] == buckets[2][1]["args"]["turn"])
    late = [call for of_rank in buckets for call in of_rank if call["args"]["turn"] == buckets[0][1]["args"]["turn"]]
    assert all(call["ts"] + call["dur"] >= came for call in late)
    assert {pair[0]["pid"] for pair in reader.flows.values()} >= {2}, "no arrow leads away from the late rank"
    assert {pair[1]["pid"] for pair in reader.flows.values() if pair[0]["pid"] == 2} == {0, 1}

    text = page.read_text()
    worst = _table(text, "Who came last")[0]
    assert worst[0] == "2" and _LATE * 800 < float(worst[3]) < 10000, worst
    # Other work on the machine may make a rank later than the test does.
    assert "trainer0/bucket" in worst[5] or float(worst[3]) > _LATE * 1200, worst
    assert [row[:3] for row in _table(text, "Overlap with backward")] == [[str(r), "trainer0", "3"] for r in range(3)]
    assert "clock of rank" not in text, "the clocks of one machine were corrected"
    _check_page_stands_alone(text)
    _check_in_browser(page, ["gradients", "waits for other ranks"])


def _check_page_stands_alone(text: str) -> None:
    assert not re.search(r"https?:|<link|<img|src=|@import|url\(", text)
    assert "@@" not in text


def _check_in_browser(page, words) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return  # the other checks of this test stand without a browser
    profile = page.parent / "browser"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    legend = done.stdout.partition('id="legend"')[2].partition("</div>")[0]
    assert all(word in legend for word in words), done.stdout[:300] + done.stderr[-2000:]
    assert re.search(r'<canvas[^>]*style="height: \d+px', done.stdout), "the chart was not drawn"


_STEP = "a step with batch size 4, learning rate 0.1 (allreduce sum of float32 (25,) in place of 2 parameters)"


def _write(path, records=(), rank=0, **about) -> str:
    path.write_bytes(recording(records, rank, **about))
    return str(path)


def test_overlap_lateness_and_sizes_are_what_a_reader_would_count(tmp_path):
    records = []
    for step in range(2):  # bucket 1 is under way from 0 to 30, bucket 0 from 20 to 50: of 50 ms, 20 before the last
        at = step * 100
        records += [
            operation("trainer0/bucket1", at, at + 30, step, [0, 1], [0, 10], wait=10, signature=_STEP),
            operation("trainer0/bucket0", at + 20, at + 50, step, [1, 0], [0, 5], signature=_STEP, size=1 << 20),
        ]
    path = _write(tmp_path / "t.mykv", records)
    page = tmp_path / "page.html"
    assert main([path, "-o", str(page)]) == 0
    text = page.read_text()
    assert _table(text, "Overlap with backward") == [["0", "trainer0", "2", "50.00", "40%", "30.00"]]
    assert [row[:5] for row in _table(text, "Who came last")] == [
        ["1", "2", "50%", "20.00", "10.00"],
        ["0", "2", "50%", "10.00", "5.00"],
    ]
    assert _table(text, "Sizes") == [
        ["gradients", "below 4 KiB", "2", "0.00", "30.000", "10.000"],
        ["gradients", "1 MiB and more", "2", "2.10", "30.000", "0.000"],
    ]
    assert main([path, "-o", str(page), "--begin", "0.09"]) == 0  # the second step alone
    assert _table(page.read_text(), "Overlap with backward")[0][2] == "1"


def test_an_operation_within_the_time_of_another_takes_nothing_from_the_overlap(tmp_path):
    """Of 50 ms, 20 come before the last gradients; the second operation is over before the first."""
    within = [("trainer0/bucket1", 0, 50), ("trainer0/bucket0", 20, 30)]
    path = _write(tmp_path / "t.mykv", [operation(*one, signature=_STEP) for one in within])
    assert main([path, "-o", str(tmp_path / "page.html")]) == 0
    (row,) = _table((tmp_path / "page.html").read_text(), "Overlap with backward")
    assert row == ["0", "trainer0", "1", "50.00", "40%", "30.00"]


def test_operations_that_wait_at_the_same_time_are_counted_once(tmp_path):
    records = [operation(name, 0, 20, 0, [0, 1], [0, 20]) for name in "abc"]
    assert main([_write(tmp_path / "t.mykv", records), "-o", str(tmp_path / "page.html")]) == 0
    (row,) = _table((tmp_path / "page.html").read_text(), "Who came last")
    assert row[:4] == ["1", "3", "100%", "20.00"]


@pytest.mark.parametrize(("offset", "corrected"), [(0, 0), (7, 7), (-40, -40)])
def test_clocks_that_contradict_an_operation_are_corrected(tmp_path, offset, corrected):
    """Both ranks arrive at 10 and end at 12 ms. Rank 1 records from 5 ms on; its clock is `offset` ms ahead."""
    files = []
    for rank in range(2):
        later = 5 * rank
        zero = 1000 + rank * offset + later
        records = [operation("a", 10 * turn - later, 10 * turn + 2 - later, turn) for turn in (1, 2)]
        files.append(_write(tmp_path / f"{rank}.mykv", records, rank, zero=zero, hosts=[[0], [1]]))
    page, trace = tmp_path / "page.html", tmp_path / "joined.json"
    assert main([*files, "-o", str(page), "--trace", str(trace)]) == 0
    reader = TraceReader(trace)
    first, second = ([(c["ts"], c["dur"]) for c in reader.calls(rank)] for rank in range(2))
    assert first == second
    assert json.loads(trace.read_text())["otherData"]["clock_difference_us"] == [0, -1000 * corrected]
    assert (f"corrected by {abs(offset)}.000 ms" in page.read_text()) == (offset != 0)


@pytest.mark.parametrize(("ranks", "title"), [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0 to 8")])
def test_the_title_names_up_to_eight_ranks(tmp_path, ranks, title):
    files = [_write(tmp_path / f"{rank}.mykv", rank=rank, size=ranks) for rank in range(ranks)]
    page = tmp_path / "page.html"
    assert main([*files, "-o", str(page)]) == 0
    assert f"<title>Timeline of ranks {title}</title>" in page.read_text()


def test_a_file_that_ends_within_a_record_is_shown_without_it(tmp_path):
    """As a killed process or a full disk leaves it."""
    records = [operation("a", 0, 1), operation("b", 1, 2), awake("runtime thread", 0, 3)]
    whole = recording(records)
    trace = tmp_path / "trace.json"
    for cut in range(len(recording(records[:1])), len(whole) + 1):
        (tmp_path / "t.mykv").write_bytes(whole[:cut])
        assert main([str(tmp_path / "t.mykv"), "-o", str(tmp_path / "page.html"), "--trace", str(trace)]) == 0
        second = cut >= len(recording(records[:2]))
        assert [call["args"]["bytes"] for call in TraceReader(trace).calls(0)] == [100] * (1 + second)


def test_operations_that_were_left_out_are_counted(tmp_path):
    path = _write(tmp_path / "t.mykv", [operation("a", 0, 1), dropped(2, 7), dropped(3, 5)])
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main([path, "-o", str(page), "--trace", str(trace)]) == 0
    assert "could not be written fast enough: 12." in page.read_text()
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "i"]
    assert [(event["ts"], event["args"]["operations"]) for event in events] == [(2000, 7), (3000, 5)]


def test_any_name_is_shown_as_it_is(tmp_path):
    name = "</script><b>@@DATA@@ 中"
    path = _write(tmp_path / "t.mykv", [operation(name, 0, 1, 0, [0, 1], [0, 1])])
    assert main([path, "-o", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert name in data["names"] and "<b>" not in text and "&lt;/script&gt;&lt;b&gt;@@DATA@@ 中" in text
    _check_in_browser(tmp_path / "page.html", ["allreduce"])


def test_a_timeline_without_operations_makes_a_page(tmp_path):
    path = _write(tmp_path / "t.mykv", [awake("runtime thread", 0, 1)])
    assert main([path, "-o", str(tmp_path / "page.html")]) == 0
    assert "No operation was recorded." in (tmp_path / "page.html").read_text()


def test_the_folder_alone_makes_a_page_without_mxnet(tmp_path):
    """docs/timeline.md: on a machine that has neither MXNet nor mykv."""
    shutil.copytree(Path(sys.modules[main.__module__].__file__).parent, tmp_path / "timeline")
    path = _write(tmp_path / "t.mykv", [operation("a", 0, 1)])
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-m", "timeline", path]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "<title>Timeline" in (tmp_path / "timeline.html").read_text()


def _files(tmp_path) -> dict[str, str]:
    whole = recording([operation("a", 0, 1)])
    traces = {"otherData": {"mykv": "1.2.3"}, "traceEvents": []}
    files = {"empty": b"", "text": b"no JSON", "list": b"[]", "profile": b'{"traceEvents": []}'}
    files["joined"] = json.dumps(traces).encode()
    files["another"] = b'{"zero_ns": 0}\n'
    files["noise"] = recording([b"\0" * 20])
    files["kind"] = recording([b"\x09\0\0\0\x08\0\0\0"])
    files["short"] = recording([operation("a", 0, 1)[:4] + b"\x48\0\0\0" + b"\xff" * 64])
    paths = {"folder": str(tmp_path), "missing": str(tmp_path / "missing")}
    for name, content in {**files, "good": whole}.items():
        (tmp_path / name).write_bytes(content)
        paths[name] = str(tmp_path / name)
    paths["same rank"] = _write(tmp_path / "same")
    paths["other job"] = _write(tmp_path / "job", rank=1, job="other")
    paths["other size"] = _write(tmp_path / "size", rank=1, size=3)
    return paths


def test_wrong_files_are_named_in_a_sentence(tmp_path, capsys):
    paths = _files(tmp_path)
    for given, expected in [
        (["missing"], "missing cannot be read: No such file"),
        (["folder"], "cannot be read: Is a directory"),
        (["empty"], "empty is empty"),
        (["text"], "text is not a timeline of mykv"),
        (["list"], "list is not a timeline of mykv"),
        (["another"], "another is not a timeline of mykv"),
        (["noise"], "noise is not a timeline of mykv .*no record begins at byte"),
        (["kind"], "kind is not a timeline of mykv .*no record begins at byte"),
        (["short"], "short is not a timeline of mykv .*record is too short"),
        (["profile"], "profile is a trace for viewers"),
        (["joined"], "joined is a trace for viewers"),
        (["good", "same rank"], "are both of rank 0"),
        (["good", "other job"], r"are of different jobs \(one, 2 ranks, 1 hosts and other"),
        (["good", "other size"], "are of different jobs"),
    ]:
        output = tmp_path / "page.html"
        assert main([*(paths[name] for name in given), "-o", str(output)]) == 2
        said = capsys.readouterr().err
        assert re.search(expected, said) and said.count("\n") == 1 and "Traceback" not in said, (given, said)
        assert not output.exists()


def test_what_it_reads_is_not_overwritten_and_a_page_that_cannot_be_written_is_named(tmp_path, capsys):
    good = _files(tmp_path)["good"]
    (tmp_path / "link").symlink_to(good)
    for options, expected in [
        (["-o", good], "is one of the files to read"),
        (["-o", str(tmp_path / "p"), "--trace", good], "is one of the files to read"),
        (["-o", os.path.relpath(good)], "is one of the files to read"),
        (["-o", str(tmp_path / "link")], "is one of the files to read"),
        (["-o", str(tmp_path / "p"), "--trace", str(tmp_path / "p")], "Give two names"),
        (["-o", str(tmp_path / "none" / "p")], "cannot be written: No such file"),
    ]:
        before = Path(good).read_bytes()
        assert main([good, *options]) == 2
        assert expected in capsys.readouterr().err
        assert Path(good).read_bytes() == before


def test_the_help_has_examples():
    done = _run("--help")
    assert done.returncode == 0 and "timeline-{rank}.mykv" in done.stdout and "--trace" in done.stdout
