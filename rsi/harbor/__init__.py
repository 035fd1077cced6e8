"""Harbor tasks: read, written, built into images, graded. Spec: harbor 0.26, task schema 1.4."""
