"""The scanner that the dashboards' checks stand on."""

import pytest

from tests.unit.dashboards.promql import scan


def test_a_selector_knows_its_matchers_its_range_and_its_calls():
    found = scan('histogram_quantile(0.99, sum by (job, le) (rate(x_bucket{a=~"b|c", d!=""}[5m])))')
    (selector,) = found.selectors
    assert selector.metric == "x_bucket"
    assert selector.matchers == {"a": ("=~", '"b|c"'), "d": ("!=", '""')}
    assert selector.range == "5m"
    assert selector.functions == ("histogram_quantile", "sum", "rate")
    assert found.grouping_labels == {"job", "le"}
    assert selector.text == 'x_bucket{a=~"b|c", d!=""}'


def test_operators_and_clauses_are_no_metrics():
    found = scan("a > on (job) (b + 2) and c unless ignoring (x) d or avg(e) by (y) * 1e-3")
    assert [selector.metric for selector in found.selectors] == ["a", "b", "c", "d", "e"]
    assert found.grouping_labels == {"job", "x", "y"}


def test_a_rate_around_one_selector_does_not_cover_the_next():
    first, second = scan("rate(a[1m]) / b").selectors
    assert (first.functions, first.range) == (("rate",), "1m")
    assert (second.functions, second.range) == ((), None)


def test_names_of_recording_rules_have_colons():
    (selector,) = scan("deriv(job:waiting:sum[10m]) > 0.05").selectors
    assert selector.metric == "job:waiting:sum"


def test_what_promql_does_not_know_is_refused():
    with pytest.raises(ValueError, match="unexpected"):
        scan("sum(a) ; drop")
