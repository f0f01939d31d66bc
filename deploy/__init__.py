"""Manifests for EKS, rendered from one values file."""
