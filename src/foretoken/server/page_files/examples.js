// What the buttons fill in: texts that a model of Python can do something with.

const SHOWN = `def count(path, encoding="utf-8"):
    """Return the number of lines and words of a file."""
    lines = words = 0
    with open(path, encoding=encoding) as file:
        for line in file:
            lines += 1
            words += len(line.split())
    return lines, words
`;
const EDIT = `# original\n${SHOWN}# edited: rename count to count_words\n`;

export const EXAMPLES = {
  code: {
    prompt: "class Queue:\n    def __init__(self):\n        self._items = []\n\n    def __len__(self):",
    temperature: 0.6,
    seed: 3,
    max_tokens: 82,
  },
  json: {
    prompt: "# One user of the test data, as JSON\nuser = ",
    structure: '\\{"name": "[a-z]{3,10}", "age": [1-9]\\d, "permission": "(read|write|admin)", "tags": \\["[a-z]{3,8}", "[a-z]{3,8}"\\]\\}',
    max_tokens: 80,
  },
  prediction: { prompt: `${EDIT}def`, prediction: SHOWN.slice("def".length), max_tokens: 70 },
  chat: { endpoint: "chat", prompt: EDIT, max_tokens: 100 },
};
