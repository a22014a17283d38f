"""PromQL expressions that several dashboards use."""

from __future__ import annotations

from grafana.panels import Query

# Selectors of the router's and the workers' series.
ROUTER = 'job=~"$job",instance=~"$instance"'
OF_MODEL = f'{ROUTER},model=~"$model"'
ENGINE = f'{ROUTER},model_name=~"$model"'
WINDOW = "[$__rate_interval]"


def rate(metric: str, where: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}{WINDOW}))"


def ratio(above: str, below: str) -> str:
    """Return a quotient; no value, instead of NaN, if the divisor is 0."""
    return f"{above} / ({below} > 0)"


def part(some: str, whole: str) -> str:
    """Return a part's share of the whole; 0 if the part has no series."""
    return ratio(f"({some} or 0 * {whole})", whole)


def mean(histogram: str, where: str, by: str = "") -> str:
    return ratio(rate(f"{histogram}_sum", where, by), rate(f"{histogram}_count", where, by))


def quantile(share: float, histogram: str, where: str, by: str = "") -> str:
    """Return a quantile; no value without observations."""
    grouped = f"{by}, le" if by else "le"
    seen = rate(f"{histogram}_count", where, by)
    matching = f"on ({by}) " if by else "on () "
    buckets = rate(f"{histogram}_bucket", where, grouped)
    return f"histogram_quantile({share:g}, {buckets}) and {matching}({seen} > 0)"


def quantiles(histogram: str, where: str, by: str = "", *shares: float) -> tuple[Query, ...]:
    labels = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return tuple(
        Query(quantile(share, histogram, where, by), f"{labels} p{share * 100:g}".strip())
        for share in shares or (0.5, 0.95, 0.99)
    )


def within(histogram: str, where: str, bound: str, by: str = "") -> str:
    """Return the share of observations at or below a bucket's bound."""
    good = rate(f"{histogram}_bucket", f'{where},le="{bound}"', by)
    return ratio(good, rate(f"{histogram}_count", where, by))
