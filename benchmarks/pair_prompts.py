"""Prompts of `real_pair.py`: code, chat, edits of a given text and summaries, twelve of each kind.

All are written for this file. A turn asks prompts that no turn before it asked, so that no engine
has read its own answer: answers that are known are not what a look-up is measured with.
"""

from itertools import product

CODE = (
    "Write a Python function that parses a duration such as '1h 30m 5s' into seconds.",
    "Write a Python class for a least-recently-used cache with get, put and a size limit.",
    "Write a function in C that reverses the words of a string in place.",
    "Write a Rust function that reads lines from standard input and counts words.",
    "Write a SQL query that finds the three best-selling products of every month of 2024.",
    "Write a Python script that walks a folder and prints files that have equal contents.",
    "Write a JavaScript function that debounces another one, with an option to run at once.",
    "Write a Go function that merges two sorted slices of integers without using append.",
    "Write a Python context manager that times a block and logs the time, with a test for it.",
    "Write a bash script that keeps the newest seven backups in a folder and removes others.",
    "Write a Python function that validates an IPv4 address without the standard library.",
    "Write a binary search tree in Java with insert, contains and an in-order iterator.",
)
CHAT = (
    "Why does bread rise, and what goes wrong when it does not?",
    "Explain to a ten-year-old why the moon has phases.",
    "I have two hours in Lisbon between trains. What would you do?",
    "What is the difference between TCP and UDP, and when would I choose which?",
    "Give me five ideas for a birthday of somebody who dislikes surprises.",
    "How do I ask my landlord to mend the heating without sounding rude?",
    "What should I look at before I buy a used bicycle?",
    "Describe how a refrigerator works, step by step.",
    "Which vegetables can I sow in September, and how do I protect them?",
    "What are good habits for somebody who starts to learn the violin at forty?",
    "Explain what a database index is and when it makes things slower.",
    "How does a vaccine teach the body something about an illness?",
)
_LISTINGS = (
    """def load_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            parts = line.strip().split(",")
            if len(parts) != 4:
                continue
            number, customer, amount, paid = parts
            orders.append(
                {"number": int(number), "customer": customer, "amount": float(amount),
                 "paid": paid == "yes"}
            )
    return orders


def unpaid_total(orders):
    total = 0.0
    for order in orders:
        if not order["paid"]:
            total += order["amount"]
    return total
""",
    """class Thermostat:
    def __init__(self, target, tolerance=0.5):
        self.target = target
        self.tolerance = tolerance
        self.heating = False
        self.readings = []

    def update(self, temperature):
        self.readings.append(temperature)
        if temperature < self.target - self.tolerance:
            self.heating = True
        elif temperature > self.target + self.tolerance:
            self.heating = False
        return self.heating

    def average(self, count):
        last = self.readings[-count:]
        return sum(last) / len(last)
""",
    """function renderTable(rows, columns) {
  let html = "<table><tr>";
  for (const column of columns) {
    html += "<th>" + column.title + "</th>";
  }
  html += "</tr>";
  for (const row of rows) {
    html += "<tr>";
    for (const column of columns) {
      html += "<td>" + row[column.name] + "</td>";
    }
    html += "</tr>";
  }
  return html + "</table>";
}
""",
    """def shortest_path(graph, start, goal):
    queue = [(0, start, [start])]
    seen = set()
    while queue:
        queue.sort()
        cost, node, path = queue.pop(0)
        if node == goal:
            return cost, path
        if node in seen:
            continue
        seen.add(node)
        for neighbour, weight in graph[node]:
            if neighbour not in seen:
                queue.append((cost + weight, neighbour, path + [neighbour]))
    return None
""",
)
_CHANGES = (
    "Give every function a docstring and answer with the whole code:",
    "Rename the variables so that they are clearer, and answer with the whole code:",
    "Handle empty and malformed input, and answer with the whole code:",
)
_TEXTS = (
    "The town council met on Tuesday to decide what becomes of the old cannery at the harbour. "
    "The building has stood empty since 2009, when the last fish was packed there. An architect"
    " showed plans for forty flats, a market hall and a boathouse on the ground floor. "
    "Neighbours feared for the view and asked where sixty more cars would be parked. The "
    "harbour master said that the quay wall has to be mended first, at a price of two million, "
    "whatever is built. The council put the decision off until May and asked for a second plan "
    "with fewer flats and more workshops.",
    "From: Maren. Subject: outage on Monday. At 9:14 the payment service began to answer with "
    "errors, and by 9:20 every third order failed. The cause was a certificate that expired on "
    "Sunday night; the reminder had gone to a mailbox that nobody reads since the team was "
    "renamed. Jonas renewed it at 10:02, but two of five servers kept the old one until they "
    "were restarted at 10:31. We lost about 410 orders and wrote to all customers on the same "
    "day. From now on the expiry is checked by a monitor that pages whoever is on call, thirty "
    "and seven days ahead.",
    "Swifts spend almost all of their lives in the air. They eat, drink, gather feathers for "
    "their nests and even sleep on the wing, in short spells while gliding high above the "
    "ground. A young swift that leaves its nest in July may not land again until it breeds "
    "itself, two or three years later. The birds winter in Africa south of the Congo and come "
    "back in the first days of May. Because they nest in gaps below roofs, they lose their "
    "homes when houses are insulated; boxes that are built into the new facade are taken within"
    " a few seasons.",
    "The new version of our scheduling tool changes how shifts are traded. Until now a trade "
    "had to be confirmed by the supervisor before it took effect, which took two days on "
    "average. From March on a trade holds as soon as both people agree, if both have the "
    "training for the shift and neither would work more than ten hours in a row. Supervisors "
    "see all trades on one page and may undo one until the evening before. Trades across "
    "departments still need a signature. The old paper forms will be accepted until the end of "
    "April and then no more.",
)
_SUMMARIES = (
    "Summarise this in two sentences:",
    "List the facts of this text as bullet points, in its own words where possible:",
    "Write a headline and a short version of this for a newsletter:",
)
EDIT = tuple(f"{change}\n\n```\n{listing}```" for change, listing in product(_CHANGES, _LISTINGS))
SUMMARY = tuple(f"{wish}\n\n{text}" for wish, text in product(_SUMMARIES, _TEXTS))
KINDS = {"code": CODE, "chat": CHAT, "edit": EDIT, "summary": SUMMARY}


def prompts_of(turn: int, each: int) -> list[tuple[str, str]]:
    """(kind, prompt) of one turn, `each` of every kind, other ones than those of turns before it
    until all have been asked."""
    return [
        (kind, prompts[(turn * each + place) % len(prompts)])
        for kind, prompts in KINDS.items()
        for place in range(each)
    ]
