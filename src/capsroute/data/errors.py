"""The two errors a user of the data layer sees: each message is one line."""


class DataError(ValueError):
    """Data that is there but wrong: damaged, out of range, or laid out otherwise than expected."""


class MissingDataError(DataError, FileNotFoundError):
    """Data that is not there; the message says where it was looked for and how to get it."""
