"""The bucket as a read-only volume, through the Mountpoint for Amazon S3 CSI driver."""

from __future__ import annotations

from typing import Any

from deploy.values import Values

MOUNT = "/mnt/bucket"
VOLUME = "bucket"
# the driver ignores the size, the API wants one
_SIZE = "1Gi"


def _volume_name(values: Values) -> str:
    return f"{values.namespace}-{values.name}-bucket"


def volume(values: Values) -> dict[str, Any]:
    """The PersistentVolume: our prefix of the bucket, mounted without a right to write."""
    store = values.storage
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _volume_name(values)},
        "spec": {
            "capacity": {"storage": _SIZE},
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": values.namespace, "name": f"{values.name}-bucket"},
            # no cache: a bundle is read once, by the fetch
            "mountOptions": [
                "read-only",
                "allow-other",
                f"region={values.region}",
                f"prefix={store.prefix}/",
                f"uid={store.uid}",
                f"gid={store.gid}",
            ],
            "csi": {
                "driver": "s3.csi.aws.com",
                # unique in the cluster, or the driver mounts only one of two
                "volumeHandle": _volume_name(values),
                "volumeAttributes": {"bucketName": store.bucket},
            },
        },
    }


def claim(values: Values) -> dict[str, Any]:
    """The PersistentVolumeClaim that the pods name."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{values.name}-bucket", "namespace": values.namespace},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": _volume_name(values),
            "resources": {"requests": {"storage": _SIZE}},
        },
    }


def bucket_volume(values: Values) -> dict[str, Any]:
    """The volume of a pod."""
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": f"{values.name}-bucket", "readOnly": True}}


def bucket_mount() -> dict[str, Any]:
    return {"name": VOLUME, "mountPath": MOUNT, "readOnly": True}
