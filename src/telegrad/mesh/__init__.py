"""Process groups and device meshes over telegrad workers."""

from telegrad.mesh.worker_mesh import WorkerMesh, current_mesh, gathered, init_mesh, replicate

__all__ = ["WorkerMesh", "current_mesh", "gathered", "init_mesh", "replicate"]
