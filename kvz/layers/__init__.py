"""What each kind of cache layer holds, how it is read and how it is put back.

A kind is a list of parts (`kvz.layers.table`); a part knows some attributes of a layer object.
Classes are told apart by name, so that nothing here imports transformers.
"""

from __future__ import annotations
