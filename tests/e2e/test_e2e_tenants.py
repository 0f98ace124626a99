"""API keys are tenants, and tenants don't see each other's cache: tested as a pair, so that no cache can't pass."""

from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.system import System
from support.wait import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The tide comes and the tide goes, and the moon looks on. " * 12


def usage_of(system: System, key: str) -> dict[str, int]:
    """`prompt`, `cached` and `completion` tokens of one request."""
    answer = httpx.post(
        f"{system.url}/v1/completions",
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return {
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "completion": usage["completion_tokens"],
    }


def account_of(metrics_url: str, tenant: str) -> dict[str, int]:
    """What the conductor's metrics say of this tenant's tokens."""
    return {
        sample.labels["kind"]: int(sample.value)
        for family in text_string_to_metric_families(httpx.get(metrics_url).text)
        if family.name == "halfmoon_conductor_tenant_tokens"
        for sample in family.samples
        if sample.labels["tenant"] == tenant and sample.labels["model"] == MODEL
    }


async def test_the_same_tenant_hits_another_misses_and_each_has_its_account(
    tcp_system: System, conductor_metrics: str
) -> None:
    before = {tenant: Counter(account_of(conductor_metrics, tenant)) for tenant in ("alpha", "beta")}
    used = {"alpha": Counter[str](), "beta": Counter[str]()}
    for tenant in ("alpha", "beta"):
        usages = [usage_of(tcp_system, f"sk-{tenant}")]
        assert usages[0]["cached"] == 0
        # The conductor hears of a chunk a little after the answer that it was computed for.
        while usages[-1]["cached"] == 0 and len(usages) < 20:
            usages.append(usage_of(tcp_system, f"sk-{tenant}"))
        assert usages[-1]["cached"] > 0
        for usage in usages:
            used[tenant].update(usage)

    def has_been_told() -> bool:
        return all(account_of(conductor_metrics, tenant) == before[tenant] + used[tenant] for tenant in used)

    await until(has_been_told, what="the conductor's accounts")


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
