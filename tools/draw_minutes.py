"""Draws docs/minutes.png: bits per byte of Tiny Shakespeare's val part over minutes, of runs that were measured.

$ python tools/draw_minutes.py        # after a row in RUNS has changed; where each is from: docs/performance.md#loss
"""
from pathlib import Path

from matplotlib.figure import Figure

RUNS = [  # (minutes, all included; bits per byte; label; where the label stands; measured here)
    (0.2, 2.67, 'a small Qwen3, 0.2M\ntwo CPU cores', (8, 4), True),
    (0.8, 2.71, "nanoGPT's CPU recipe, 0.8M\ntwo CPU cores", (8, 2), True),
    (1.5, 2.12, "nanoGPT's baby GPT, 10.7M\none H100", (-75, 10), True),
    (3.0, 2.12, "the same by nanoGPT\none A100, as its README says", (-20, 34), False),
    (5.0, 2.05, 'config/five_minutes.py, 0.9M\ntwo CPU cores', (-140, -12), True)]


def main():
    figure = Figure(figsize=(7, 3.4), layout='constrained')
    axes = figure.add_subplot(xlabel='minutes of wall time', ylabel='bits per byte (lower is better)', xscale='log')
    for minutes, bits, label, offset, is_ours in RUNS:
        axes.plot(minutes, bits, 'o', color='C0' if is_ours else '0.6', markersize=8)
        axes.annotate(label, (minutes, bits), xytext=offset, textcoords='offset points', fontsize=8)
    ticks = [0.2, 0.5, 1, 2, 5]
    axes.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.15, 9)
    axes.set_ylim(1.9, 2.9)
    axes.grid(alpha=0.3)
    figure.savefig(Path(__file__).parent.parent / 'docs' / 'minutes.png', dpi=110)


if __name__ == '__main__':
    main()
