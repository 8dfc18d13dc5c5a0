"""Charts of a report, and text of results on its page."""

from __future__ import annotations

import math
import re

from lra.experiments.results import html, report
from lra.experiments.results.curve_plot import MOST_POINTS
from tests.drawings import lines, words
from tests.experiments.results.test_ledger import put, result
from tests.experiments.results.test_report import cells, pictures


def test_chance_looks_flat_and_one_value_is_a_dot():
    [one] = pictures(html.curve_chart("a", "steps", {"flash": [[(7.0, 50.0)]]}, {"flash": 0}, log=True))
    assert [(len(line.points), line.dots) for line in lines(one).values()] == [(1, 1)]
    [flat] = pictures(html.curve_chart("a", "step", {"flash": [[(1.0, 50.0), (2.0, 50.1)]]}, {"flash": 0}, log=False))
    assert {"48", "50", "52"} <= set(words(flat))
    (_, low), (_, high) = lines(flat)["flash-0"].points
    assert 0 < low - high < 10


def test_almost_equal_values_have_ticks_that_do_not_overlap_and_names_at_their_points():
    values = {"flash": [[(0.727681, 50.0)]], "linear": [[(0.727682, 40.0)]]}
    [drawn] = pictures(html.curve_chart("a", "memory", values, {"flash": 0, "linear": 1}, log=True))
    across = {"0.5", "1", "0.727681", "0.727682"} & set(words(drawn))
    assert across == {"0.5", "1"} and {"flash", "linear"} <= set(words(drawn))
    first, second = (lines(drawn)[f"{name}-0"].points[0][0] for name in values)
    assert abs(first - second) < 1
    many = {"flash": [[(1.0, 50.0), (4e5, 60.0)]]}
    [drawn] = pictures(html.curve_chart("a", "step", many, {"flash": 0}, log=False))
    assert 2 <= sum("00,000" in word for word in words(drawn)) <= html.MOST_TICKS
    assert "flash" not in words(drawn), "a line has its name in the legend"


def test_long_curves_are_thinned_and_those_that_are_no_numbers_left_out(tmp_path):
    for cell, last in zip(cells(["listops"], ["flash"], 2), (0.4, math.nan), strict=True):
        put(tmp_path / f"{cell.seed}" / "result.json", result(cell))
        rows = [f"{step},{0.2 + step % 2 / 10}" for step in range(999)] + [f"999,{last}\n"]
        (tmp_path / f"{cell.seed}" / "metrics.csv").write_text("\n".join(["step,val/accuracy", *rows]))
    report.make_report(
        "table3", [f"results={tmp_path}", "tasks=listops", "attns=flash", "seeds=2", f"out={tmp_path / 'out'}"]
    )
    page = (tmp_path / "out" / "table3.html").read_text()
    assert "Without curves: 1" in page and "can&#x27;t be read as curves (line 1001 is no row" in page
    curves = lines(next(picture for picture in pictures(page) if "step" in words(picture)))
    assert set(curves) == {"flash-0"}
    points = curves["flash-0"].points
    assert 100 < len(points) <= MOST_POINTS + 1 and points[-1][1] == min(y for _, y in points)


def test_text_of_results_is_escaped(tmp_path):
    [cell] = cells(["listops"], ["flash"])
    one = result(cell)
    one["environment"] |= {"gpu": "<b>&|GPU_1\nGPU", "commit": "<script>x"}
    one["test"]["baselines"] = {"majority": 0.1, "<i>": 0.2}
    put(tmp_path / "a<u>" / "result.json", one)
    (tmp_path / "a<u>" / "metrics.csv").write_text("step,val/accuracy\nx,0.1\n")
    report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash", f"out={tmp_path / 'out'}"])
    page = (tmp_path / "out" / "table3.html").read_text()
    assert not re.search("<b>|<i>|<u>|<script", page) and "&lt;b&gt;&amp;" in page
    assert "can&#x27;t be read as curves" in page
    comments = [line for line in (tmp_path / "out" / "table3.tex").read_text().splitlines() if "GPU" in line]
    assert comments and all(line.startswith("%") for line in comments)


def test_what_is_special_in_markdown_and_latex_is_escaped(tmp_path):
    [cell] = cells(["listops"], ["flash"])
    one = result(cell)
    one["environment"] |= {"commit": "abc\ndef"}
    one["test"]["baselines"] = {"majority": 0.1, r"a|b\c & 9% $x #1 _{y} ~z^": 0.2}
    put(tmp_path / "a.json", one)
    report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash", f"out={tmp_path / 'out'}"])
    markdown, latex = ((tmp_path / "out" / f"table3.{end}").read_text().splitlines() for end in ("md", "tex"))
    assert r"| strongest baseline | 20.0 a\|b\\c & 9% $x #1 _{y} ~z^ |" in markdown
    escaped = r"a|b\textbackslash{}c \& 9\% \$x \#1 \_\{y\} \textasciitilde{}z\^{}"
    assert rf"strongest baseline & 20.0 {escaped} \\" in latex
    assert "% commit: abc def" in latex
