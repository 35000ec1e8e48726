"""Capture of log records."""

import logging


class LogCapture(logging.Handler):
    """Context manager that records what neuron_sched logs, independently of `VLLM_LOGGING_LEVEL`."""

    def __init__(self):
        super().__init__(level=logging.DEBUG)
        self.records = []
        self.levels = {logger: logger.level for logger in map(logging.getLogger, ("vllm", "neuron_sched"))}

    def emit(self, record):
        if "neuron_sched" in record.name or "neuron_sched" in record.pathname:
            self.records.append((record.levelno, record.getMessage()))

    def __enter__(self):
        for logger in self.levels:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_):
        for logger, level in self.levels.items():
            logger.removeHandler(self)
            logger.setLevel(level)

    def messages(self, level):
        return [message for record_level, message in self.records if record_level == level]

    @property
    def infos(self):
        return self.messages(logging.INFO)

    @property
    def warnings(self):
        return self.messages(logging.WARNING)

    @property
    def errors(self):
        return self.messages(logging.ERROR)
