"""Which class serves each service, and what every operation needs, for docs and tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ister.broker.operations import Need, need_of
from ister.broker.services.admin import (
    BrokerAdminService,
    ClusterAdminService,
    NamespaceAdminService,
    TopicAdminService,
)
from ister.broker.services.consumer import ConsumerService
from ister.broker.services.dead_letters import DeadLetterService
from ister.broker.services.delivery import DeliveryService
from ister.broker.services.discovery import DiscoveryService, HealthService, StorageService
from ister.broker.services.ister_admin import IsterAdminService
from ister.broker.services.peers import PeersService
from ister.broker.services.producer import ProducerService
from ister.broker.services.schemas import SchemaService
from ister.broker.services.security_admin import SecurityAdmin
from ister.wire import describe_service

SERVICES: Final[Mapping[str, type]] = {
    "danube.ProducerService": ProducerService,
    "danube.ConsumerService": ConsumerService,
    "danube.Discovery": DiscoveryService,
    "danube.HealthCheck": HealthService,
    "danube.StorageService": StorageService,
    "danube_schema.SchemaRegistry": SchemaService,
    "danube_admin.BrokerAdmin": BrokerAdminService,
    "danube_admin.ClusterAdmin": ClusterAdminService,
    "danube_admin.NamespaceAdmin": NamespaceAdminService,
    "danube_admin.TopicAdmin": TopicAdminService,
    "danube_admin.SecurityAdmin": SecurityAdmin,
    "ister.Delivery": DeliveryService,
    "ister.Admin": IsterAdminService,
    "ister.DeadLetters": DeadLetterService,
    "ister.Peers": PeersService,
}


def operations() -> Iterator[tuple[str, Need]]:
    """Every operation by its path, `service/method`, with what it needs."""
    for name, service in SERVICES.items():
        for method in describe_service(name).methods:
            yield f"{name}/{method.name}", need_of(getattr(service, method.name))
