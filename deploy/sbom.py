"""Print what this machine has installed, Python's packages and Debian's, as an SBOM in CycloneDX's format.

Run by Dockerfile.server in each image, which has it at /usr/local/share/sbom.cdx.json. Needs nothing but Python.
"""

import json
import re
import subprocess
import sys
from importlib import metadata
from urllib.parse import quote


def component(kind: str, name: str, version: str, **more: object) -> dict[str, object]:
    """Return an installed package as a component. kind: of its purl, with the namespace."""
    purl = f"pkg:{kind}/{quote(name)}@{quote(version)}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl, **more}


def python_packages() -> list[dict[str, object]]:
    """Return the distributions that this interpreter imports, with the licences of those that declare one."""
    found = {}
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        licence = one.metadata.get("License-Expression")
        found[name] = component(
            "pypi", name, one.version, **({"licenses": [{"expression": licence}]} if licence else {})
        )
    return [found[name] for name in sorted(found)]


def debian_packages() -> list[dict[str, object]]:
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\\n"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [component("deb/debian", *line.split()) for line in lines]


def main() -> None:
    components = python_packages() + debian_packages()
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
    json.dump(sbom, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
