"""A film made by hand: one head collapses, is called and becomes sick."""

from __future__ import annotations

import numpy as np

from headwise.watch.film import Film, add_reading
from headwise.watch.trend import RULES
from reportstudy import diagnosis_of, stock_mass


def film_in(folder):
    """A film of ten readings in which one head collapses, is called and becomes sick."""
    film = Film(diagnosis_of(stock_mass()).model, rules=RULES)
    film.save(folder)
    for place in range(10):
        mass = np.full((8, 8), 0.05)
        mass[2, 5] = 1 / (1 + np.exp(3 - 0.4 * place - 0.01 * np.sin(place)))
        maps = {"first_token_mass": mass, "entropy": 3 - mass, "output_norm": 1 + mass}
        maps |= {"max_logit": 5 + mass, "sink_rate": (mass > 0.3).astype(float)}
        film = add_reading(folder, film, 10 * place, maps)
    return film
