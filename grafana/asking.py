"""Expressions that boards have in common."""

from __future__ import annotations

from grafana.panels import Query

# Of the router's own series, and of workers'.
ROUTER = 'job=~"$job",instance=~"$instance"'
OF_MODEL = f'{ROUTER},model=~"$model"'
ENGINE = f'{ROUTER},model_name=~"$model"'
WINDOW = "[$__rate_interval]"


def rate(metric: str, where: str, by: str = "") -> str:
    """Sum up how fast a counter grows."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}{WINDOW}))"


def ratio(above: str, below: str) -> str:
    """Divide; nothing, rather than NaN, where there is nothing to divide by."""
    return f"{above} / ({below} > 0)"


def part(some: str, whole: str) -> str:
    """Divide a part by the whole: nought, rather than nothing, where there never was any of it."""
    return ratio(f"({some} or 0 * {whole})", whole)


def mean(histogram: str, where: str, by: str = "") -> str:
    """Average what a histogram has seen."""
    return ratio(rate(f"{histogram}_sum", where, by), rate(f"{histogram}_count", where, by))


def quantile(share: float, histogram: str, where: str, by: str = "") -> str:
    """Estimate a quantile; nothing where nothing was seen."""
    grouped = f"{by}, le" if by else "le"
    seen = rate(f"{histogram}_count", where, by)
    matching = f"on ({by}) " if by else "on () "
    buckets = rate(f"{histogram}_bucket", where, grouped)
    return f"histogram_quantile({share:g}, {buckets}) and {matching}({seen} > 0)"


def quantiles(histogram: str, where: str, by: str = "", *shares: float) -> tuple[Query, ...]:
    """Ask for some of them."""
    labels = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return tuple(
        Query(quantile(share, histogram, where, by), f"{labels} p{share * 100:g}".strip())
        for share in shares or (0.5, 0.95, 0.99)
    )


def within(histogram: str, where: str, bound: str, by: str = "") -> str:
    """Ask which share was at or below a bucket's bound."""
    good = rate(f"{histogram}_bucket", f'{where},le="{bound}"', by)
    return ratio(good, rate(f"{histogram}_count", where, by))
