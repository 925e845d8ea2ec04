"""Chinese: how quantities are said, the words around a number that say what it is, and what nobody speaks."""

import re
from decimal import Decimal

from cosyvoice_triton.text.numbers import ROMAN, chinese, chinese_digits, roman
from cosyvoice_triton.text.quantities import Quantity, Reader, Rules, is_day
from cosyvoice_triton.text.units import UNITS

_HAN = r"\u4e00-\u9fff"
_DASH = r"\s?(?:[-~～〜–—]+)\s?"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Before a number of at least three digits that are said one by one, and after one.
_CODES = _words("码 群 QQ ID 分机 邮编 后四位 后三位 后六位 口令 快递 航班 车次 单元 号楼 座 栋 幢 车牌 订单")
_CALLS = _words("拨打 致电 呼叫 急救 报警 火警 热线 客服 拨 打 电话 打给 号码")
_SPELLED = re.compile(
    "号?(?:房|教室|会议室|病房|包间|包厢|寝室|宿舍|室)|事件|大促|晚会|购物节|恐袭|袭击|运动|地震|阅兵|狂欢|劳动节|妇女节|青年节|儿童节|国庆"
)
_KNOWN = frozenset("985 211 996 007 404 911 618 315 886 666 520 1314 233 110 119 120 12306 12315 10010 10086".split())
# After a number that counts something, of which a 2 is 两; and of which it is not.
_MEASURES = _words(
    "个 位 本 张 只 条 件 杯 瓶 辆 台 把 块 间 家 次 遍 趟 种 名 人 天 周 年 小时 分 秒 岁 倍 斤 公 千克 克 吨 升 毫 米 厘米 平方 立方 元 美元 "
    "欧元 英镑 港元 万 亿 千 百 篇 部 首 场 节 份 颗 棵 朵 头 匹 双 对 套 层 架 艘 支 枚 束 串 碗 盘 盒 包 袋 箱 桶 片 粒 句 段 页 项 道 门 所 "
    "户 点 刻 季 晚 夜 代 股 批 组 枝 根 顿 幅 滴 口 尺 亩 折 款 多个 多小时 多年 多天 步 行 列 英里 英尺 磅 海里 餐 桌 席 笔 封 集 回 轮"
)
_NOT_COUNTED = re.compile("季度|年[级代]|点[零一二三四五六七八九]")
_SCORES = _words("比分 总分 胜 负 平 击败 战胜 比例 比率 比 国足 以")
_WINS = _words(
    "逆转 获胜 取胜 击败 战胜 大胜 险胜 战平 落败 领先 落后 完胜 不敌 负于 力克 轻取 横扫 淘汰 晋级 告负 打败"
)
_LASTED = _words("用了 用 跑了 跑出 用时 耗时 历时 成绩 成绩是 时长 仅 以 超过 长达 了")
_DATES_BEFORE = _words("时间 日期 至 截止 有效期 定于 生日 今天是 公历 农历")
_DAYS = (13, 14, 17, 18, 19, 21, 22, 23, 26, 27, 28, 29, 31)  # of a month, into which nothing is divided
_DATES_AFTER = re.compile("前|起|截止|当[天日]|去|出发|到|[早晚]上?|[上下]午|的(?:会|机?票)|有效|号|日")
_HALVES = _words("上午 下午 早上 晚上 凌晨 中午 傍晚")
_BORN = re.compile(r"年(?:出?生|毕业|参军|入[伍学党]|结婚|属|高考|[级版款]|的(?:人|车|老)|[春夏秋冬]|\d{1,2}月)")
_LASTING = re.compile(r"年(?:来|的?(?:历史|时间|经验|寿命))")
_GENERATION = re.compile(r"后(?![退续来面边再])")
_LISTED = re.compile(r"比[零一二两三四五六七八九十百千万点]+[、，,;；和]\s?\Z")
_LIST = re.compile(r"[零一二三四五六七八九]{3,}[、，,或和]\s?\Z")
_WAN = re.compile(r"[次人粉个元像播阅用浏下观点+]|多|左右|以[上内]")
_STYLE = re.compile("的?[歌复风音年经怀老]")  # after a decade in Latin letters


def _plus(found: re.Match[str]) -> str:
    return "加" if "=" in found.string or (found[1].isdigit() and found[2].isdigit()) else found[0]


# fmt: off
_RULES: Rules = [
    ("[Ⅰ-ⅫIVX]", [
        ("[Ⅰ-Ⅻ]", lambda found: chinese(ord(found[0]) - 0x215F)),
        (rf"(?<=第){ROMAN}(?=[届章卷部节条期回集幕])|(?<=[{_HAN}]){ROMAN}(?=世)", lambda found: chinese(roman(found[0]))),
    ]),
    (r"T\d\d:|[Nn][Oo]\.|[图表例式满]|·|[A-Z][a-z]{2}\. ", [
        (r"(?<=\d{4}-\d\d-\d\d)T(\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z?", r" \1"),
        (r"(?<![A-Za-z])[Nn][Oo]\.\s?(?=\d{1,2}(?!\d))", "第"), (r"(?<=[图表例式])(\d+)[-–](?=\d)", r"\1杠"),
        (r"满(\d+)-(?=\d+(?![\d岁周天月年]))", r"满\1减"), (r"(?<=[A-Z][a-z]{2})\.\s(?=\d)", " "),
        (r"(?<![\d.])(\d{1,2})·(\d{1,2})(?!\d)", lambda found: chinese_digits(found[0])),
    ]),
    (r"[-~～〜–—/h]", [
        (rf"(?<=\d([{_HAN}])){_DASH}(?=第?\d+\1)|(?<=\d[月日号]){_DASH}(?=\d+[月日号])", "到"),
        (rf"(?:(?<=[\d万亿千百%][{_HAN}])|(?<=\d[{_HAN}A-Za-z]{{2}})|(?<=\d%))/(?=[{_HAN}])", "每"),
        (rf"(?<=\d[{_HAN}])/(min|h|s|kg|km|L)(?![A-Za-z])", lambda found: f"每{UNITS[found[1]].zh}"),
        (r"(?<![A-Za-z\d.])(\d+)\s?h\s?0?([0-5]?\d)\s?m?(?:in)?(?![A-Za-z\d])", r"\1小时\2分钟"),
    ]),
    (r"[+×*xX÷π^²³=≠≥≤≈<>√]", [
        (rf"(?<=[\dwWkK万%℃])(?<!\D18)(?<!^18)\+(?=[{_HAN}]|[，。、；]|$)", "多"),
        (r"(\d[a-z]{0,2}[²³]?)\s?[×*xX]\s?(?=\d)", r"\1乘以"), (rf"(?<=[米寸尺])\s?[×*]\s?(?=[\d{_HAN}])", "乘以"),
        (r"(?<=\d)\s?÷\s?(?=\d)", "除以"), ("π", "派"), (r"√\s?(?=\d)", "根号"),
        (r"(?:(?<=(?<![A-Za-z\d万亿千百])[A-Za-z])|(?<=[)]))(?:\^(-?\d{1,3})|([²³]))(?!\d)",
         lambda found: {"²": "平方", "2": "平方", "³": "立方", "3": "立方"}.get(found[1] or found[2]) or f"的{found[1]}次方"),
        (r"(?<=([\da-z方)]))\s?\+\s?(?=([\da-z(]))", _plus),
        (r"(?<=[\da-z方)])\s?-\s?(?=[\da-z(]{1,6}[²³]?\s?=)", "减"),
        (r"\s?(?:≥|>=)\s?(?=[-\d])", "大于等于"), (r"\s?(?:≤|<=)\s?(?=[-\d])", "小于等于"), (r"≠|!=", "不等于"),
        (r"(?<=[\w方)°%])\s?=\s?(?=[-\w])", "等于"), (r"\s?>\s?(?=\d)", "大于"), (r"\s?<\s?(?=\d)", "小于"), (r"≈\s?", "约等于"),
    ]),
]
# fmt: on


def _ordinal(digits: str) -> str:
    return chinese(int(digits), "二" if len(digits) > 2 else "两")


class Chinese(Reader):
    """Reads Chinese."""

    language = "zh"
    whole, spelled = staticmethod(chinese), staticmethod(chinese_digits)
    needed = r"[\d≥≤≈±≠²³πⅠ-ⅫIVX<>=]"
    addresses = (
        r"(?:https?://|www\.)[^\s\u4e00-\u9fff，。！？；：]+|[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
        r"|[A-Za-z][\w-]*(?:\.[A-Za-z][\w-]*)+(?:/\S*)?"
    )
    rules = _RULES
    scales = r"[十百千万亿]+|(?<=\d)[kKwW](?![A-Za-zΩ])"
    money_scales = r"(?<=\d)[MBmb]n?(?![A-Za-z])"
    per_word = plain_per_word = f"(?=[{_HAN}])"
    money_end = "(?:人民币|元|块钱|块|美元|美金|港元|港币|欧元|英镑|日元)?"
    signs = {"-": "负", "+": "正", "±": "正负", "~": "约", "≈": "约"}
    point, to, ratio_to, over, grouped, per = "点", "到", "比", "分之", "，", "每"
    year, month, day, hour, minute, second, degree, power = "年", "月", "日", "点", "分", "秒", "度", "的{}次方"

    def named(self, text: str) -> str:
        return text.replace("°", "度")

    def powered(self, it: Quantity) -> str:
        return super().powered(it).replace("的二次方", "的平方").replace("的三次方", "的立方")

    def amount(self, it: Quantity, before: str, after: str) -> str:
        scale, share = it.scale, it.unit in ("%", "％", "‰")
        if it.is_plain:
            return self._plain(it.digits, before, after)
        if not scale and not it.currency and "." in it.digits and (_SPELLED.match(after) or "双" in before[-5:]):
            month, day = it.digits.split(".")
            return self.number(month) + (self.number(day) if len(month) > 1 else chinese_digits(day))
        if scale == "W" and not _WAN.match(after):
            it, scale = it._replace(unit="W", scale=""), ""
        if (it.unit == "s" and it.digits[1:] == "0" and _STYLE.match(after)) or (
            scale == "K" and it.digits in ("2", "4", "8")
        ):
            return self.number(it.digits) + (it.unit or scale)
        if share:
            return (
                self.sign(it) + self.unit_of(it).split("每")[0] + self.number(it.digits) + scale + self.unit_of(it)[3:]
            )
        sign = self.sign(it)
        if it.sign == "-" and (it.unit[:1] in tuple("°℃℉") or after.startswith("度")):
            sign = "零下"
        if it.unit[-1:] in ("F", "℉"):
            sign += "华氏"
        if power := {"k": 3, "m": 6, "b": 9, "w": 4}.get(scale[:1].lower(), 0):
            it, scale = it._replace(parts=(f"{(Decimal(it.digits) * 10**power).normalize():f}",)), ""
        elif it.currency:
            it = it._replace(parts=(it.digits.removesuffix(".00"),))
        two = it.digits == "2" and (it.currency or it.unit or scale or _is_measure(after))
        return sign + ("两" if two and not it.power else self.powered(it)) + scale + self.unit_of(it)

    def _plain(self, digits: str, before: str, after: str) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        if after.startswith("年") and (year := _year(digits, before, after)):
            return year
        if _is_spelled(digits, before, after):
            return chinese_digits(digits)
        if before.endswith("第") and digits[0] == "2":
            return _ordinal(digits)
        return "两" if digits == "2" and _is_measure(after) else self.number(digits)

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        if first.is_plain and last.is_plain:
            if _is_score(before, after):
                return self.ratio(Quantity("ratio", (first.digits, last.digits)), before, after)
            if len(first.digits) == len(last.digits) == 4 and re.match("学?年|财年|赛季", after):
                return f"{chinese_digits(first.digits)}到{chinese_digits(last.digits)}"
            if before.endswith("第"):
                return f"{self.number(first.digits)}到第{self.number(last.digits)}"
            if re.search(r"[A-Z] \Z", before) and len(first.digits) > 2:
                return f"{chinese_digits(first.digits)}杠{chinese_digits(last.digits)}"
            if first.digits == "2" and _is_measure(after):
                return f"两到{self.said(last, '', after)}"
        if first.unit == last.unit and (first.unit in ("%", "％", "‰") or first.sign):
            return f"{self.said(first, before, '')}到{self.said(last, '', after)}"
        return super().range(first, last, before, after, dash)

    def date(self, it: Quantity, before: str, after: str) -> str:
        year, *rest = it.parts
        said = super().date(Quantity("date", ("", *rest)), before, "日" if after.startswith("号") else after)
        return (f"{chinese_digits('20' * (len(year) == 2) + year)}年" if year else "") + said

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour, minute, second, half = it.parts
        if not second and not half and _is_score(before, after):
            return self.ratio(Quantity("ratio", (hour, minute)), before, after)
        if half and not before.endswith(_HALVES):
            part = "上午" if half[0] in "aA" else "晚上" if 5 < int(hour) < 12 else "下午"
        else:
            part = ""
        if not int(hour) and not int(minute or 0):
            return f"{part}零点"
        said = super().clock(Quantity("clock", (hour, "", "", "")), before, after)
        said = part + ("两" + said[1:] if int(hour) == 2 else said)
        if second.strip("0") and before.endswith(_LASTED):
            return f"{said.replace('点', '小时') if int(hour) else ''}{chinese(int(minute))}分{self.number(second.lstrip('0'))}秒"
        if not int(minute or 0) and not second.strip("0"):
            return said
        said += f"{'零' if minute[0] == '0' else ''}{chinese(int(minute))}分"
        return said + (
            f"{'零' if second[0] == '0' else ''}{self.number(second.lstrip('0'))}秒" if second.strip("0") else ""
        )

    def slash(self, it: Quantity, before: str, after: str) -> str:
        whole, over, under = it.parts
        if "血压" in before[-8:] or it.unit == "mmHg":
            return f"{self.number(over)}，{self.number(under)}{self.unit_of(it)}"
        dated = before.endswith(_DATES_BEFORE) or _DATES_AFTER.match(after) or int(under) in _DAYS
        if is_day(it) and not it.unit and dated:
            return self.date(Quantity("date", ("", over, under)), before, after)
        return (f"{self.number(whole)}又" if whole else "") + super().slash(it, before, after)

    def code(self, it: Quantity, before: str, after: str) -> str:
        if len(it.parts) == 2 and it.parts[0][0] == "0":
            return chinese_digits("".join(it.parts))
        return ("加" if it.parts[0] == "+" else "") + super().code(it, before, after)

    def name(self, it: Quantity, before: str, after: str) -> str:
        """Read digits that touch Latin letters: a model or a train by its digits, a short one as a number."""
        whole, *parts = it.digits.split(".")
        number = len(whole) < 3 or (
            not parts and re.match("[A-Za-z]{2}|[GMT](?![A-Za-z0-9])", after) and not re.search(r"[A-Za-z]\Z", before)
        )
        said = self.number(whole) if number else chinese_digits(whole)
        return "点".join([said, *map(chinese_digits if len(parts) == 1 else self.number, parts)])


def _is_measure(after: str) -> bool:
    after = after.lstrip()
    return after.startswith(_MEASURES) and not _NOT_COUNTED.match(after)


def _is_score(before: str, after: str) -> bool:
    return before.rstrip(" :：是为").endswith(_SCORES) or after.startswith(_WINS) or bool(_LISTED.search(before))


def _is_spelled(digits: str, before: str, after: str) -> bool:
    """Return whether a number is said digit by digit because of what is around it."""
    after, head = after.lstrip(), before
    if len(digits) == 2:
        counted = before.endswith(("一米", "两米", "二米", "秒")) and not after.startswith(_MEASURES)
        return counted or (digits[1] in "05" and digits[0] in "056789" and bool(_GENERATION.match(after)))
    if len(digits) < 2:
        return False
    if _SPELLED.match(after):
        return True
    if after.startswith(_MEASURES):
        return False
    if digits in _KNOWN or (len(digits) == 4 and before.endswith("《")) or len(digits) > 6:
        return True
    while listed := _LIST.search(head):
        head = head[: listed.start()]
    head = head.rstrip(" 是为:：=")
    if (head.endswith(_CALLS) and digits[0] in "19" and len(digits) in (3, 5)) or head.endswith(_CODES):
        return True
    return bool(re.search(r"[^零一二三四五六七八九十百]号\Z", head) or re.search(r"[A-Za-z] \Z|[A-Z]·\Z", before))


def _year(digits: str, before: str, after: str) -> str:
    """Return a year by its digits; "" if it is a number of years."""
    if before.endswith(("公元前", "距今", "民国")) or _LASTING.match(after):
        return ""
    if len(digits) == 4 and digits[0] in "12":
        return chinese_digits(digits)
    return chinese_digits(digits) if len(digits) == 2 and (_BORN.match(after) or digits[0] == "0") else ""


CHINESE = Chinese()

_DASH_BETWEEN_BLANKS = re.compile(r" +[-–]+ +")
_BLANK = re.compile(r"(?<![!-~]) | (?![!-~]|\Z)")  # stays between two ASCII characters
_FULL_STOP = re.compile(r"\.+(?![0-9A-Za-z]| \d)")  # not that of "2.0.1", "example.com" and "Dec. 31"
_BEFORE_NUMBER = re.compile("[)）](?=[零一二两三四五六七八九十])")  # a bracket that keeps two numbers apart
_UNSPOKEN = str.maketrans({"²": "平方", "³": "立方"} | dict.fromkeys("（）【】()`", ""))


def cleaned(sentence: str) -> str:
    """Return `sentence` without the blanks and marks that a Chinese reader does not speak; Western full stops as
    Chinese."""
    sentence = _FULL_STOP.sub("。", _DASH_BETWEEN_BLANKS.sub("，", sentence))
    return _BLANK.sub("", _BEFORE_NUMBER.sub("，", sentence)).translate(_UNSPOKEN)
