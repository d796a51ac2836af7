"""The operator's commands: ``afferent store stat`` and its like, on a daemon that runs."""
