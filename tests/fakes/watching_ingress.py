"""An ingress that watches a folder of adapters, with a disk that can be out of order."""

import threading

from service.adapters.control import AdapterControl
from service.adapters.folder_look import FolderLook, look_at
from service.adapters.folder_reader import FolderReader
from service.adapters.folder_watch import FolderWatch
from service.adapters.shelf import AdapterShelf
from service.adapters.unmapped import unmapped_adapter
from tests.fakes.small_adapters import TAKEN
from workers.adapters.ref import AdapterRef

CONFIGURED = AdapterRef("fixed", "/elsewhere", "key")


class Counter:
    """Of refusals."""

    num_refusals = 0

    def on_refusal(self):
        self.num_refusals += 1


class Disk:
    """look_error, read_error, device: what comes of it instead, where it is set. read_names: whose
    files were read. threads: that looked."""

    def __init__(self):
        self.look_error = None
        self.read_error = None
        self.device = None
        self.read_names = []
        self.threads = set()

    def look(self, folder):
        self.threads.add(threading.get_ident())
        if self.look_error is not None:
            raise self.look_error
        found = look_at(folder)
        return found if self.device is None else FolderLook(self.device, found.subfolders)

    def read(self, name, folder, info):
        self.read_names.append(name)
        if self.read_error is not None:
            raise self.read_error
        return unmapped_adapter(name, folder, info)


class Ingress:
    """Of the models tiny and other; tiny's folder is watched."""

    def __init__(self, folder, board):
        self.shelves = {
            "tiny": AdapterShelf("tiny", {"fixed": CONFIGURED}, has_folder=True),
            "other": AdapterShelf("other", {}),
        }
        self.folder, self.board = folder, board
        self.disk, self.metrics = Disk(), Counter()
        self.info_error = None
        self.control = AdapterControl(self.shelves, self.info_of, board)
        reader = FolderReader(folder, self.disk.look, self.disk.read)
        self.watch = FolderWatch("tiny", reader, self.control, board, self.metrics, 0.01)

    def info_of(self, model):
        if self.info_error is not None:
            raise self.info_error
        return TAKEN

    async def turns(self, num_turns=2):
        for _ in range(num_turns):
            while await self.watch.turn():
                pass

    @property
    def names(self):
        return {one.name for one in self.shelves["tiny"]} - {"fixed"}

    def find(self, name):
        return self.shelves["tiny"].find(name)
