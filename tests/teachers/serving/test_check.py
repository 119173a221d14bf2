"""`check_server`, and `xtok doctor` with a teacher's server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import Cli
from running_servers import running
from served_teachers import TeacherServer
from starlette.applications import Starlette

from xtok.errors import XtokError
from xtok.teachers.serving import check_server
from xtok.teachers.serving.check import ServerReport
from xtok.tokenizers import Tokenizer

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
Kind = Literal["vllm", "sglang"]
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.9"}


def checked(model: TeacherServer, teacher: Tokenizer) -> ServerReport:
    with running(model.app) as url:
        report = check_server(url, teacher)
        assert report.url == url
    return report


@KINDS
@pytest.mark.parametrize("tokenizes", [True, False])
def test_a_server_without_problems(digits: Tokenizer, kind: Kind, tokenizes: bool) -> None:
    report = checked(TeacherServer(digits, kind, tokenizes=tokenizes), digits)
    assert report.findings == ()
    assert not report.failed
    assert (report.kind, report.version, report.model) == (kind, VERSIONS[kind], "the-teacher")
    assert (report.max_model_len, report.candidates) == (2048, 64)
    assert (report.tokenizer_difference, report.logprobs_mode) == ("", "raw_logprobs")
    assert report.prefix_caching is False


@pytest.mark.parametrize(("allowed", "failed"), [(63, False), (20, False), (19, True)])
def test_a_low_limit_on_candidates_is_reported(
    digits: Tokenizer, allowed: int, failed: bool
) -> None:
    report = checked(TeacherServer(digits, max_logprobs=allowed), digits)
    [finding] = report.findings
    assert (report.candidates, report.failed) == (allowed, failed)
    assert f"at most {allowed} candidates per token" in finding.problem
    assert finding.change == "start the server with --max-logprobs 64"


@KINDS
def test_a_different_tokenizer(digits: Tokenizer, byte_level: Tokenizer, kind: Kind) -> None:
    """The server's ids may be outside the teacher's vocabulary."""
    for served, teacher in ((digits, byte_level), (byte_level, digits)):
        report = checked(TeacherServer(served, kind), teacher)
        [finding] = report.findings
        assert report.failed
        assert report.tokenizer_difference
        assert report.tokenizer_difference in finding.problem
        option = {"vllm": "--tokenizer ", "sglang": "--tokenizer-path "}[kind]
        assert f"{option}{teacher.vocabulary.model_id}" in finding.change


@KINDS
def test_a_server_without_a_tokenizer(digits: Tokenizer, kind: Kind) -> None:
    report = checked(TeacherServer(digits, kind, texts=False), digits)
    [finding] = report.findings
    assert report.tokenizer_difference is None
    assert not report.failed
    assert "--skip-tokenizer-init" in finding.change


def test_a_server_with_short_contexts(digits: Tokenizer) -> None:
    report = checked(TeacherServer(digits, max_model_len=32), digits)
    assert (report.logprobs_mode, report.findings) == ("raw_logprobs", ())


def test_modes_of_log_probabilities(digits: Tokenizer) -> None:
    model = TeacherServer(digits)
    model.mode = "processed_logprobs"
    report = checked(model, digits)
    assert (report.logprobs_mode, report.findings) == ("processed_logprobs", ())
    model.mode = "raw_logits"
    report = checked(model, digits)
    [finding] = report.findings
    assert (report.kind, report.logprobs_mode, report.failed) == ("vllm", "raw_logits", True)
    assert "--logprobs-mode raw_logprobs" in finding.change


@KINDS
def test_prefix_caching_matters_only_for_vllm(digits: Tokenizer, kind: Kind) -> None:
    """SGLang computes a prompt's log-probabilities again, so prefix caching does not matter."""
    model = TeacherServer(digits, kind)
    model.prefix_caching = True
    report = checked(model, digits)
    assert report.prefix_caching
    assert not report.failed
    changes = ["start the server with --no-enable-prefix-caching"] if kind == "vllm" else []
    assert [finding.change for finding in report.findings] == changes


def test_a_server_that_does_not_score(digits: Tokenizer) -> None:
    with running(Starlette()) as url:
        report = check_server(url, digits)
    [finding] = report.findings
    assert (report.kind, report.candidates, report.failed) == (None, 0, True)
    assert "no log-probabilities of a prompt" in finding.problem
    with pytest.raises(XtokError) as raised:
        check_server("127.0.0.1:9", digits)
    assert raised.value.parameter == "teacher_url"


def test_the_key_in_the_environment_is_sent(
    digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TeacherServer(digits)
    monkeypatch.setenv("XTOK_TEACHER_API_KEY", "theirs")
    checked(model, digits)
    assert model.keys == {"Bearer theirs"}


def test_doctor_with_a_server(cli: Cli, small: Path, digits: Tokenizer) -> None:
    models = str(small / "small-byte-level"), str(small / "small-digits")
    with running(TeacherServer(digits, max_logprobs=20).app) as url:
        result = cli("doctor", *models, "--teacher-url", url)
        assert (result.returncode, result.stderr) == (0, "")
        for text in (url, "vLLM 0.32.0", "20", "equal", "raw_logprobs"):
            assert text in result.stdout
        assert "--max-logprobs 64" in result.stdout
        value: dict[str, Any] = json.loads(
            cli("doctor", *models, "--teacher-url", url, "--json").stdout
        )
        assert (value["server"]["candidates"], len(value["server"]["findings"])) == (20, 1)
        wrong = cli("doctor", *models[::-1], "--teacher-url", url)
    assert wrong.returncode == 3
    assert "different tokenizer" in wrong.stdout
    single = cli("doctor", models[0], "--teacher-url", url)
    assert single.returncode == 2
