"""Dormant neurons of a whole model, as `diagnose` and `evaluate` count them in shared passes."""

from __future__ import annotations

from headwise.diagnosis.dormancy import (
    ACTIVATION_TAU,
    WEIGHT_THRESHOLD,
    dormancy_measurement,
    dormancy_of,
    dormant_weights,
)
from headwise.forward.measurements import run_measurement
from headwise.models.architectures import layers_of


def weight_dormancy(model, threshold=WEIGHT_THRESHOLD):
    layers = range(len(layers_of(model)))
    return dormancy_of([dormant_weights(model, layer, threshold) for layer in layers], threshold)


def activation_dormancy(model, batches, tau=ACTIVATION_TAU):
    return run_measurement(model, dormancy_measurement(model, batches, tau))
