"""ARC as in Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003).

A plain transcription of figure 4, one request at a time; lists begin with the LRU page.
"""


class ReferenceArc:
    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def request(self, x):
        """Returns whether x was in the cache."""
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:  # case II
            self.p = min(self.p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)), c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            self.p = max(self.p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)), 0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            l1, l2 = len(t1) + len(b1), len(t2) + len(b2)
            if l1 == c:
                if len(t1) < c:
                    del b1[0]
                    self.replace(x)
                else:
                    del t1[0]
            elif l1 + l2 >= c:
                if l1 + l2 == 2 * c:
                    del b2[0]
                self.replace(x)
            t1.append(x)
        return False

    def replace(self, x):
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))
