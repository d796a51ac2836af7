"""The programs of `benchmarks.batch_job`, each as a user would write it."""
