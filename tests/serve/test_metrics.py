"""Metrics and gauges of a real server, after real searches."""

from prometheus_client.parser import text_string_to_metric_families

from served import held


def scraped(server):
    """Samples by name and labels."""
    text = server.http.get("/metrics").text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_searches_did(serve):
    server = serve(search={"speculation": "exact"})
    found = [server.chat(seed=seed).json() for seed in range(3)]
    server.chat(search={"n": 3, "width": 2})
    seen = scraped(server)
    usage = [each["usage"] for each in found]
    assert seen["beamwright_requests_total", "done"] == 3
    generated = sum(each["completion_tokens"] for each in usage)
    assert seen["beamwright_tokens_total", "generated"] == generated
    assert seen["beamwright_tokens_total", "prompt"] == sum(u["prompt_tokens"] for u in usage)
    kept = sum(each["search"]["kept_tokens"] for each in usage)
    assert seen["beamwright_tokens_total", "kept"] == kept
    assert seen["beamwright_search_seconds_count",] == 3
    assert seen["beamwright_time_to_first_text_seconds_count",] == 3
    assert seen["beamwright_row_tokens_total", "written"] >= generated
    computed, written = (seen["beamwright_row_tokens_total", k] for k in ("computed", "written"))
    assert computed >= written
    assert seen["beamwright_cache_tokens_total", "generator", "needed"] > 0
    assert seen["beamwright_kv_bytes", "device", "generator"] == 0
    assert seen["beamwright_kv_budget_bytes", "device", "generator"] > 0
    assert seen["beamwright_requests_now", "running"] == 0


def test_what_a_search_is_doing(serve):
    server = serve()
    with held(server) as gate:
        asked = server.later(seed=1)
        gate.arrived.wait(20)
        seen, shown = scraped(server), server.http.get("/feed/gauges").json()["gauges"]
        assert seen["beamwright_requests_now", "running"] == 1
        assert seen["beamwright_kv_bytes", "device", "generator"] > 0
        named = {gauge["name"]: gauge for gauge in shown}
        assert named["searches"]["value"] == 1
        assert 0 < named["generator's KV"]["value"] <= named["generator's KV"]["of"]
        assert named["tokens"]["total"] > 0
    assert asked.result(30).status_code == 200
