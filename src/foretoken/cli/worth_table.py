"""What `foretoken train eval` found, as a table. Knows how it looks, not how it was measured."""

from rich import box
from rich.table import Table

from foretoken.training.evaluation import Worth


def worth_table(found: Worth, title: str) -> Table:
    """Rows by temperature: accepted share, tokens a verification, speed-up of 1, 2, ... drafts."""
    most = max(len(kept.lengths) for kept in found.acceptance.values())
    by_count = {cost.drafts: cost for cost in found.costs}
    plain = f"{1e3 * by_count[0].total_s:.1f} ms"
    title = (
        f"{title}\nspeed-up: what tokens a step and the times of steps come to, "
        f"over steps of {plain} without drafts"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("temp.", no_wrap=True)
    table.add_column("drafts", no_wrap=True)
    for k in range(1, most + 1):
        table.add_column(str(k), justify="right", no_wrap=True)
    for temperature, kept in found.acceptance.items():
        shares = [f"{share:.0%}" for share in kept.by_position]
        table.add_row(temperature, "accepted", *shares)
        table.add_row("", "tokens a step", *[f"{length:.2f}" for length in kept.lengths])
        speedups = found.speedups[temperature]
        best = max(speedups, default=0.0)
        shown = [f"[bold]{s:.2f}[/]" if s == best else f"{s:.2f}" for s in speedups]
        table.add_row("", "speed-up", *shown)
        table.add_section()
    steps = [
        f"{1e3 * by_count[k].total_s:.1f}" if k in by_count else "" for k in range(1, most + 1)
    ]
    table.add_row("any", "step, ms", *steps)
    return table
