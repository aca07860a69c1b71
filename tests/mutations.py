"""The faults that the oracle must find, all of them: those of the chapter *How paged engines
break*."""

from paged.lab.faults import faults, planted

MUTATIONS = faults()
mutated = planted
