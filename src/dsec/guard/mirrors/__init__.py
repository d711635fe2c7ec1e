"""Package mirrors as policy objects: caching, filtering proxies for PyPI, npm, Debian, Go modules and crates. docs/mirrors.md.

    policy      what a sandbox may see of each of them, compiled from libdsec.mirrors
    upstream    where the real ones are reached, with a bound on every wait
    cache       content by its hash, on disk, shared by all sandboxes
    pypi, npm, debian, golang, crates
                one protocol each: an index as the policy shows it, and the files that such an index names
    app         one HTTP application of all of them, told who asks by its connection
    clients     the settings by which ordinary clients inside find them
    hostconfig  upstreams, from the client settings of this machine
"""
