"""Access policy of a sandbox: which system calls its commands may make."""
