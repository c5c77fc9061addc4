"""Look into a Trainer; only this module knows what its private parts are called."""

from __future__ import annotations

from threading import Thread
from typing import Any

from autocache import ActivationStore
from pipetransformer import LayeredModel, Trainer
from pipetransformer.elastic import Deployment, Elasticity
from pipetransformer.feed import BatchForecast, SampleFeed
from pipetransformer.model import Task
from pipetransformer.stage import Stage


def task_of(trainer: Trainer) -> Task:
    """Return the model, its loss and its settings, as the parts of a run share them."""
    return trainer._task


def layered_of(trainer: Trainer) -> LayeredModel:
    """Return the model with its sublayers."""
    return trainer._task.model


def model_of(trainer: Trainer) -> Any:
    """Return the module that the user gave."""
    return trainer._task.model.model


def deployment_of(trainer: Trainer) -> Deployment:
    """Return what holds this rank's layers."""
    return trainer._deployment


def stage_of(trainer: Trainer) -> Stage:
    """Return what this rank trains at present."""
    return trainer._deployment.active_stage


def elastic_of(trainer: Trainer) -> Elasticity:
    """Return what decides between two steps."""
    return trainer._elastic


def coming_of(trainer: Trainer) -> BatchForecast:
    """Return which samples follow."""
    return trainer._coming


def feed_of(trainer: Trainer) -> SampleFeed:
    """Return what gives the training samples."""
    return trainer._feed


def store_of(trainer: Trainer) -> ActivationStore | None:
    """Return the rows that the cache keeps of the training samples."""
    return trainer._feed.keeper.store


def evaluation_feed_of(trainer: Trainer) -> SampleFeed:
    """Return what gives the samples of evaluations."""
    return trainer._evaluator.feed


def bridge_of(trainer: Any) -> Any:
    """Return what transformers' callbacks and log see of a Trainer with its interface."""
    return trainer._bridge


def is_labelled(trainer: Any, dataset: Any) -> bool:
    """Return whether a Trainer with transformers' interface finds labels in a data set."""
    return trainer._is_labelled(dataset)


def writer_of(trainer: Trainer) -> Thread:
    """Return the thread that writes the latest checkpoint."""
    return trainer._state._saver._writer
