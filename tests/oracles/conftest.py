"""Says at the end how many layouts were tried, and with -v for each sample."""

from oracles.samples import TRIED


def pytest_terminal_summary(terminalreporter):
    """Print what the layout tests tried."""
    if TRIED:
        small, large, illegal = (sum(row[i] for row in TRIED.values()) for i in range(3))
        terminalreporter.write_line(f"layouts: {len(TRIED)} samples, {small} legal layouts on 2 to 4 ranks and {large} on 8 gave the 1-rank answer, "
                                    f"{illegal} were refused as illegal")
        for name, (n_small, n_large, n_illegal, n_all) in TRIED.items() if terminalreporter.config.option.verbose > 0 else ():
            capped = "" if n_small + n_illegal >= n_all else f", a fixed-seed choice of {n_all}"
            terminalreporter.write_line(f"  {name}: {n_small} legal and {n_illegal} illegal{capped}; {n_large} on 8 ranks")
