"""The whole tree of settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from ister.config.broker import BrokerConfig, DispatchConfig
from ister.config.pipeline import PipelineConfig
from ister.config.storage import StorageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
