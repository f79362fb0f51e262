"""Source that Python runs at its start, to change a module once it is imported."""


def when_imported(name: str, change: str) -> str:
    """Return source that runs the lines `change` once the module of that name is imported; they call it `module`."""
    body = "".join(f"        {line}\n" for line in change.strip().splitlines())
    return f"""
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            found = importlib.util.find_spec(name)
            self.execute, found.loader.exec_module = found.loader.exec_module, self.exec_module
            return found

    def exec_module(self, module):
        self.execute(module)
{body}
sys.meta_path.insert(0, Finder())
"""
