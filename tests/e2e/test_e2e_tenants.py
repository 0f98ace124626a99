"""API keys are tenants, and tenants don't see each other's cache: tested as a pair, so that no cache can't pass."""

import httpx
import pytest

from support.system import System

pytestmark = [pytest.mark.timeout(120), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The tide comes and the tide goes, and the moon looks on. " * 12


def cached_tokens(system: System, key: str) -> int:
    answer = httpx.post(
        f"{system.url}/v1/completions",
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return cached


def test_the_same_tenant_hits_and_another_misses(tcp_system: System) -> None:
    assert cached_tokens(tcp_system, "sk-alpha") == 0
    assert cached_tokens(tcp_system, "sk-alpha") > 0
    assert cached_tokens(tcp_system, "sk-beta") == 0
    assert cached_tokens(tcp_system, "sk-beta") > 0


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-gamma"}, {"authorization": "sk-alpha"}])
def test_without_a_key_nobody_gets_in(tcp_system: System, headers: dict[str, str]) -> None:
    answer = httpx.post(
        f"{tcp_system.url}/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers, timeout=30
    )
    assert answer.status_code == 401
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "sk-" not in answer.text


def test_no_key_and_no_secret_in_any_log(tcp_system: System) -> None:
    secret = (tcp_system.data_dir / "cluster.secret").read_text().strip()
    for log in (tcp_system.data_dir / "logs").iterdir():
        content = log.read_text(errors="replace")
        assert "sk-alpha" not in content
        assert secret not in content
