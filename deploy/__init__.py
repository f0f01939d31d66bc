"""Manifests for EKS, rendered from one values file."""

from model.errors import quiet_start

quiet_start()
